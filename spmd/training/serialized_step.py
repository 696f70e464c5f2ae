"""Compiled train step as bytes, to be loaded by another process without a trace.

A process that has compiled a step calls `serialize_step`, a later one `read_step` and
`SerializedStep.load`. The bytes begin with the environment of the compilation, the key, as JSON:
`key_differences` compares it with that of the process, before anything is unpickled.

A key cannot hold all that shapes a trace: closures, files, the environment. `LoweringCheck` traces
the step in a thread, after it was loaded, and compares the StableHLO texts.

`SerializedStep.load` unpickles: who can write the bytes executes code here.
"""

import dataclasses
import hashlib
import json
import pickle
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from spmd.errors import Problem
from spmd.training.alternating import AlternatingStep
from spmd.training.step import StepProgram, TrainStep, compressed_text

AnyStep = TrainStep | AlternatingStep
Key = Mapping[str, Mapping[str, Any]]
"""Part of the environment, such as `versions` → JSON value by name."""

_MAGIC = b"spmd compiled step 1\n"
_HEADER_MAX_BYTES = 16 << 20
_PYTHON_CALL = re.compile(rb"python\w*_callback|is_host_transfer = true")
_SHOWN_LINES = 2
_SHOWN_COLUMNS = 100


class NotSerializableError(Exception):
    """The step cannot be written as bytes, with the reason."""


class UnreadableError(Exception):
    """Bytes are no step, or a damaged one, with the reason."""


@dataclasses.dataclass(frozen=True)
class SerializedProgram:
    """Program of one network.

    Attributes:
        prefix: Prefix of the network in an alternating step; empty for a step of one network.
        pickled: The program and the trees of its inputs and outputs, pickled, then by zlib.
        text: The StableHLO text that it was compiled from, by zlib.
    """

    prefix: str
    pickled: bytes
    text: bytes


@dataclasses.dataclass(frozen=True)
class SerializedStep:
    """Programs of a step, with a key: the environment of their compilation."""

    key: Key
    programs: Sequence[SerializedProgram]

    def to_bytes(self) -> bytes:
        """Return one JSON line after a line with the version of the form, and the contents."""
        contents = list[bytes]()
        table = list[dict[str, Any]]()
        for program in self.programs:
            for part in (program.pickled, program.text):
                digest = hashlib.sha256(part).hexdigest()
                table.append({"prefix": program.prefix, "bytes": len(part), "sha256": digest})
                contents.append(part)
        header = json.dumps({"key": self.key, "contents": table}).encode()
        return b"".join([_MAGIC, header, b"\n", *contents])

    def load(self, step: AnyStep, batch: Any) -> list[StepProgram]:
        """Unpickle the programs for a step and batches of a shape; this executes their code.

        Raises:
            UnreadableError: The runtime refuses a program, or it is not of such a step.
        """
        parts = step.part_batches(batch)
        if [prefix for prefix, _, _ in parts] != [program.prefix for program in self.programs]:
            raise UnreadableError("it has programs of other networks")
        loaded = list[StepProgram]()
        for (_, part, part_batch), program in zip(parts, self.programs, strict=True):
            loaded.append(_load(program, part, part_batch))
        return loaded


def install_programs(step: AnyStep, batch: Any, programs: Sequence[StepProgram]) -> None:
    """Make the programs of `SerializedStep.load` those of a step for batches of a shape."""
    for (_, part, part_batch), program in zip(step.part_batches(batch), programs, strict=True):
        part.install(part_batch, program)


def serialize_step(step: AnyStep, batch: Any, key: Key) -> bytes:
    """Return the compiled step for batches of a shape as bytes.

    Args:
        batch: Arrays or shapes; the step is compiled for it, if it is not yet.
        key: The environment, for `key_differences`.

    Raises:
        NotSerializableError: JAX cannot serialize it, or it would not compute the same elsewhere.
    """
    problem = serialization_fault(step)
    if problem:
        raise NotSerializableError(problem)
    programs = list[SerializedProgram]()
    for prefix, part, part_batch in step.part_batches(batch):
        program = part.program(part_batch)
        if program.is_read:
            # XLA:CPU would write it without its functions, and fail in its first execution.
            raise NotSerializableError("it was read from the compilation cache, not compiled")
        if _PYTHON_CALL.search(zlib.decompress(program.text)):
            raise NotSerializableError("it calls functions of this process (jax.debug.callback)")
        try:
            pickled = pickle.dumps(serialize(program.compiled))
        except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
            raise NotSerializableError(f"JAX cannot serialize it: {error}") from error
        except (pickle.PicklingError, jax.errors.JaxRuntimeError) as error:
            raise NotSerializableError(f"JAX cannot serialize it: {error}") from error
        programs.append(SerializedProgram(prefix, zlib.compress(pickled, 1), program.text))
    return SerializedStep(key, programs).to_bytes()


def serialization_fault(step: AnyStep) -> str:
    """Return the reason not to load programs of such a step; empty if they can be loaded."""
    # As of a compilation cache (`cache_fault`), but the devices may be of an absent machine.
    device = step.mesh.devices.flat[0]
    if step.mesh.shape["pipe"] > 1 and device.platform == "cpu":
        return f"a pipeline on CPUs can hang in programs that JAX {jax.__version__} reads back"
    return ""


def read_step(data: bytes) -> SerializedStep:
    """Return the step of some bytes; nothing is unpickled.

    Raises:
        UnreadableError: They are something else, or a checksum differs.
    """
    if not data.startswith(_MAGIC):
        raise UnreadableError("it is no compiled step of this version of spmd")
    end = data.find(b"\n", len(_MAGIC), len(_MAGIC) + _HEADER_MAX_BYTES)
    try:
        header = json.loads(data[len(_MAGIC) : max(end, 0)])
        key = {str(part): dict(values) for part, values in header["key"].items()}
        table = [
            (str(row["prefix"]), int(row["bytes"]), row["sha256"]) for row in header["contents"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UnreadableError("it is damaged: its first lines cannot be read") from None
    contents = list[bytes]()
    start = end + 1
    for _, size, digest in table:
        part = data[start : start + size]
        if size < 0 or hashlib.sha256(part).hexdigest() != digest:
            raise UnreadableError("it is damaged: a checksum differs")
        contents.append(part)
        start += size
    if start != len(data) or len(table) % 2:
        raise UnreadableError("it is damaged: it has another length")
    programs = list[SerializedProgram]()
    for (prefix, _, _), pickled, text in zip(
        table[::2], contents[::2], contents[1::2], strict=True
    ):
        programs.append(SerializedProgram(prefix, pickled, text))
    return SerializedStep(key, programs)


def key_differences(stored: Key, own: Key) -> list[str]:
    """Return a clause about each changed value of a key.

    Example:
        >>> key_differences({"versions": {"jax": "0.10.1"}}, {"versions": {"jax": "0.10.2"}})
        ['versions.jax was 0.10.1 and is 0.10.2']
    """
    found = list[str]()
    for part in [*own, *(part for part in stored if part not in own)]:
        before = stored.get(part, {})
        after = own.get(part, {})
        for name in sorted({*before, *after}):
            old = before.get(name, "absent")
            new = after.get(name, "absent")
            if old != new:
                found.append(f"{part}.{name} {_change(old, new)}")
    return found


def _change(old: Any, new: Any) -> str:
    """Return a clause about two values; of lists of words, the words in one of them alone."""
    if not (isinstance(old, list) and isinstance(new, list)):
        return f"was {_shown(old)} and is {_shown(new)}"
    words = list[str]()
    words += [f"-{word}" for word in old if word not in new]
    words += [f"+{word}" for word in new if word not in old]
    return f"changes: {_shown(' '.join(words) or 'another order')}"


def _shown(value: Any) -> str:
    text = str(value)
    if len(text) <= _SHOWN_COLUMNS:
        return text or "empty"
    return f"{text[:_SHOWN_COLUMNS]}…"


class LoweringCheck:
    """Comparison of a loaded step with its trace in this process.

    `start` traces and lowers it in a thread. `problems` waits for that, and compares.
    """

    def __init__(self, step: AnyStep, batch: Any, loaded: SerializedStep) -> None:
        self._step = step
        self._batch = batch
        self._loaded = loaded
        self._lowered: Future[list[bytes]] | None = None
        self._pool = ThreadPoolExecutor(1, "spmd-trace")

    def start(self) -> None:
        """Start the trace in a thread, once."""
        if self._lowered is None:
            self._lowered = self._pool.submit(self._lower)
            self._pool.shutdown(wait=False)

    @property
    def is_ready(self) -> bool:
        """Whether `problems` returns at once."""
        return self._lowered is not None and self._lowered.done()

    def problems(self) -> list[Problem]:
        """Return a problem for each program with another text here.

        It also raises what the trace raises, such as `AnnotationError`.
        """
        self.start()
        assert self._lowered is not None
        # Contexts of JAX, such as `jax.default_matmul_precision`, belong to a thread. So a trace
        # of another thread that fails or differs is repeated in this one.
        problems = None
        if self._lowered.exception() is None:
            problems = list(self._differences(self._lowered.result()))
        if problems == []:
            return []
        return list(self._differences(self._lower()))

    def _lower(self) -> list[bytes]:
        """Return the text of each program, by zlib."""
        texts = list[bytes]()
        for _, part, part_batch in self._step.part_batches(self._batch):
            texts.append(compressed_text(part.lower(part_batch)))
        return texts

    def _differences(self, texts: Sequence[bytes]) -> Iterator[Problem]:
        for program, text in zip(self._loaded.programs, texts, strict=True):
            # Another build of zlib may compress to other bytes.
            if program.text == text or zlib.decompress(program.text) == zlib.decompress(text):
                continue
            name = program.prefix.removesuffix("/") or "the step"
            what = "is traced to another program here than the one that was loaded"
            yield Problem(name, what, text_difference(program.text, text))


def text_difference(loaded: bytes, traced: bytes) -> str:
    """Return the first different lines of two texts, given as compressed by zlib."""
    before = zlib.decompress(loaded).decode().splitlines()
    after = zlib.decompress(traced).decode().splitlines()
    first = 0
    for first, (old, new) in enumerate(zip(before, after, strict=False)):  # noqa: B007
        if old != new:
            break
    lines = [f"line {first + 1} of {len(after)}:"]
    lines += [f"- {_shown(line.strip())}" for line in before[first : first + _SHOWN_LINES]]
    lines += [f"+ {_shown(line.strip())}" for line in after[first : first + _SHOWN_LINES]]
    return "\n".join(lines)


def _load(program: SerializedProgram, part: TrainStep, batch: Any) -> StepProgram:
    """Unpickle a program onto the devices of a step."""
    devices = list(part.mesh.devices.flat)
    try:
        payload, inputs, outputs = pickle.loads(zlib.decompress(program.pickled))
        compiled = deserialize_and_load(
            payload, inputs, outputs, backend=devices[0].client, execution_devices=devices
        )
    except (jax.errors.JaxRuntimeError, pickle.UnpicklingError, zlib.error) as error:
        raise UnreadableError(f"it cannot be loaded: {str(error).splitlines()[0]}") from error
    except (ValueError, TypeError, AttributeError, ImportError, KeyError, EOFError) as error:
        raise UnreadableError(f"it cannot be loaded: {error}") from error
    expected = jax.tree.structure(((part.abstract_state(), batch), {}))
    if compiled.in_tree != expected:
        raise UnreadableError("it takes another state or another batch")
    return StepProgram(compiled, program.text, is_read=True)
