"""Process for chat templates, with limits of memory and time.

A template comes with a tokenizer, from elsewhere. jinja2's sandbox keeps it from Python's
attributes, and not from asking for any amount of memory or time, in too many ways to list: products,
powers, joined texts, formats, widths of filters, nested loops; constants already while it is
compiled. So the system limits the process, which is started once and used for all templates.

Parent and process exchange lines of JSON. Nothing of a template's is executed in the parent.
"""

import atexit
import contextlib
import datetime
import functools
import hashlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2.ext
from jinja2 import TemplateError, meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spmd.data.message_fields import RecordedMessage

BEGIN, END = "\ufdd0", "\ufdd1"  # Unicode gives these no meaning in any text
"""Marks around the text of a generation block."""
NOW = "strftime_now"
MAX_SOURCE = 2**20
"""Most characters of a template."""
MAX_MEMORY = 2**30
"""Bytes of address space that compiling or rendering may add."""
MAX_TEXT = 2**26
"""Most characters of a text that a template writes."""
MAX_SECONDS = 20
"""Seconds of a processor that compiling or rendering may take."""

_MAX_SAID = 1000
"""Most characters of an error."""
_PATIENCE = 600.0
"""Seconds for an answer, of a machine that may be busy or swap."""
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from spmd.data.template_worker import serve
serve(int(sys.argv[2]), int(sys.argv[3]))
"""
# What an expression of a template may raise on values that it does not expect.
_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    SyntaxError,
    AssertionError,
)


class RejectedTemplateError(ValueError):
    """A template refuses its messages, fails, or asks for too much."""


class Part(NamedTuple):
    """The first `length` of several messages, or all, with the prompt for an answer or without."""

    length: int | None = None
    prompt: bool = False


class TemplateWorker:
    """Process for compiling and rendering templates, started at the first request.

    It is started again after it has ended. A template that asks for too much once is not asked again.

    Args:
        memory: Bytes of address space that compiling or rendering may add.
        seconds: Seconds of a processor that compiling or rendering may take.
    """

    def __init__(self, memory: int = MAX_MEMORY, seconds: int = MAX_SECONDS) -> None:
        self._memory = memory
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._known: set[str] = set()
        self._greedy: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def check(self, source: str) -> dict[str, bool]:
        """Return whether a template `writes_date` and `marks_turns`.

        Raises:
            RejectedTemplateError: It is not a template, or compiling it asks for too much.
        """
        return self._ask(source, {"do": "check"})

    def render(
        self,
        source: str,
        messages: list[Mapping[str, Any]],
        values: Mapping[str, Any],
        now: datetime.datetime | None,
        parts: Sequence[Part] = (Part(),),
    ) -> tuple[list[str], set[str]]:
        """Return the text of each part of the messages, and the fields read for the first one.

        Raises:
            RejectedTemplateError: The template refuses them, fails, or asks for too much.
        """
        request = {
            "do": "render",
            "messages": messages,
            "values": values,
            "now": now.isoformat() if now else "",
            "parts": parts,
        }
        answer = self._ask(source, request)
        return answer["texts"], set(answer["read"])

    def _ask(self, source: str, request: dict[str, Any]) -> dict[str, Any]:
        key = hashlib.sha256(source.encode("utf-8", errors="surrogatepass")).hexdigest()
        request["key"] = key
        with self._lock:
            answer = self._greedy.get(key) or self._exchange(key, source, request)
            if answer is None:  # ended by somebody, perhaps before this request
                answer = self._exchange(key, source, request)
            if answer is None:
                answer = {"rejected": "ended the process that renders it", "ends": True}
            if answer.get("ends"):
                self.stop()
                self._greedy[key] = answer  # the next conversation would take as long
        if "rejected" in answer:
            raise RejectedTemplateError(answer["rejected"])
        return answer

    def _exchange(self, key: str, source: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a request; None if the process has ended without one."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        if key not in self._known:
            request = {**request, "source": source}
        self._known.add(key)
        try:
            process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
            process.stdin.flush()
            is_ready = select.select([process.stdout], [], [], _PATIENCE)[0]
            answer = process.stdout.readline() if is_ready else b""
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        if answer.endswith(b"\n"):
            return dict(json.loads(answer))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        code = process.returncode
        self.stop()
        if code is None or code == -signal.SIGXCPU:
            return {"rejected": f"takes more than {self._seconds} seconds", "ends": True}
        return None

    def _running(self) -> "subprocess.Popen[bytes]":
        """Return the process; start one after its end, and in a forked process."""
        if self._process is not None and self._owner == os.getpid():
            if self._process.poll() is None:
                return self._process
            self.stop()
        limits = [json.dumps(sys.path), str(self._memory), str(self._seconds)]
        # `-P`: nothing is imported from the folder that it is started in.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._owner = os.getpid()
        self._known.clear()
        atexit.register(self.stop)
        return self._process

    def stop(self) -> None:
        """End the process, if this one has started it."""
        process = self._process
        self._process = None
        atexit.unregister(self.stop)
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.communicate()


WORKER = TemplateWorker()
"""The process of this process."""


def serve(memory: int, seconds: int) -> None:
    """Answer requests on standard input until it ends; each has limits."""
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal: the parent decides
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory(memory)
    sources: dict[str, str] = {}
    for line in sys.stdin.buffer:
        _limit_seconds(seconds)
        answer = _answer(sources, json.loads(line), memory)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _answer(sources: dict[str, str], request: Mapping[str, Any], memory: int) -> dict[str, Any]:
    key = request["key"]
    sources.setdefault(key, request.get("source", ""))
    try:
        template = _compile(sources[key])
        if request["do"] == "check":
            return _describe(sources[key])
        return _render(template, request)
    except MemoryError:
        return {"rejected": f"needs more than {memory >> 20} MiB of memory", "ends": True}
    except _FAILURES as error:
        return {"rejected": _said(error)[:_MAX_SAID]}


@functools.cache
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _limit_memory(memory: int) -> None:
    """Limit the growth of the address space to `memory` bytes, on Linux."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
        limit = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_seconds(seconds: int) -> None:
    """Let the system end this process after `seconds` more of a processor."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(usage.ru_utime + usage.ru_stime) + seconds + 1
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, most))


def _describe(source: str) -> dict[str, bool]:
    tree = _environment().parse(source)
    marks = any(node.data == BEGIN for node in tree.find_all(nodes.TemplateData))
    return {"writes_date": NOW in meta.find_undeclared_variables(tree), "marks_turns": marks}


def _render(template: jinja2.Template, request: Mapping[str, Any]) -> dict[str, Any]:
    reads: list[set[str]] = []
    texts = []
    values = dict(request["values"])
    if request["now"]:
        values[NOW] = datetime.datetime.fromisoformat(request["now"]).strftime
    for length, prompt in request["parts"]:
        read: set[str] = set()
        messages = request["messages"][:length]
        values["messages"] = [RecordedMessage(message, read) for message in messages]
        values["add_generation_prompt"] = prompt
        texts.append(template.render(values))
        reads.append(read)
        size = sum(map(len, texts))
        if size > MAX_TEXT:
            return {"rejected": f"writes {size:,} characters, above the limit of {MAX_TEXT:,}"}
    return {"texts": texts, "read": sorted(reads[0])}


def _said(error: Exception) -> str:
    """Return how a template failed: by its own refusal, or by an error of its expressions."""
    if type(error) is TemplateError:
        return f"refuses: {error}"
    return f"fails: {type(error).__name__}: {error}"


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`: its body between two marks."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body, in a scope of its own as in `transformers`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin = nodes.Output([nodes.TemplateData(BEGIN)])
        end = nodes.Output([nodes.TemplateData(END)])
        return nodes.Scope([begin, *body, end]).set_lineno(line)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of chat templates.

    Blocks are trimmed, `tojson` has no HTML escapes, and there is `raise_exception`.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "dict": lambda *pairs, **values: dict(*pairs, **values),
    }
    return environment


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)
