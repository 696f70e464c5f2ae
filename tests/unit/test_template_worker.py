"""Templates are compiled and rendered in a process with limits: none fails with a traceback or takes the machine."""

import os
import signal
import time

import pytest

from spmd.data.chat import BadConversationError, ChatTemplate, Conversation
from spmd.data.template_worker import MAX_SOURCE, WORKER, RejectedTemplateError, TemplateWorker
from spmd.errors import DataError
from tests.tiers import soak_but

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
GOOD = "{% for m in messages %}{{ m.content }}{% endfor %}"
COMPILE = {
    "nested too deeply": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested blocks": "{% for a in b %}" * 60 + "{% endfor %}" * 60,
    "many nested ifs": "{% if a %}" * 3000 + "{% endif %}" * 3000,
    "an integer of many digits": "{{ " + "9" * 5000 + " }}",
    "a long text as a constant": "{{ 'a' * (1024 ** 4) }}",
    "not closed": "{% for",
    "another template": "{% extends 'x' %}",
}
COMPILED = ("another template", "a long text as a constant")
MEMORY = {
    "a product": "{% set n = messages | length * 10 ** 11 %}{{ 'a' * n }}",
    "doubled texts": "{% set s = namespace(x='a' * 1000) %}"
    "{% for i in range(40) %}{% set s.x = s.x ~ s.x %}{% endfor %}{{ s.x }}",
    "a width": "{{ messages[0].content.center(10 ** 11) }}",
    "an indent": "{{ messages | tojson(indent=10 ** 11) }}",
    "a format": "{{ '%099999999999d' % messages | length }}",
    "long loops": "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'a' * 99999 }}"
    "{% endfor %}{% endfor %}",
}
TIME = {
    "a power": "{% set n = messages | length %}{{ (9 + n) ** (9 ** (8 + n)) }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}
SECONDS = 1


@pytest.fixture(scope="module")
def worker():
    """One with small limits, which starts again after each of them."""
    made = TemplateWorker(memory=2**28, seconds=SECONDS)
    yield made
    made.stop()


def render(worker, source):
    (text,), read = worker.render(source, MESSAGES, {}, None)
    return text, read


@pytest.mark.parametrize("kind", COMPILE)
def test_a_template_that_cannot_be_compiled_is_one_error(kind):
    """With its file and no traceback; the next template is rendered."""
    says = "is not a Jinja template"
    if kind in COMPILED:
        says = "the template (fails|needs more)"
    with pytest.raises((DataError, BadConversationError), match=says):
        ChatTemplate(COMPILE[kind], "file.jinja").render(MESSAGES)
    assert ChatTemplate(GOOD, "good").render(MESSAGES) == "hiho"


@pytest.mark.parametrize("kind", MEMORY)
def test_a_template_has_a_bound_of_memory(kind, worker):
    """Or of time, or it fails; the next one is rendered."""
    with pytest.raises(
        RejectedTemplateError, match=r"memory|takes more than|characters|fails: (Over|Value)"
    ):
        render(worker, MEMORY[kind])
    assert render(worker, GOOD) == ("hiho", {"content"})


@pytest.mark.parametrize("kind", soak_but(TIME))
def test_a_template_has_a_bound_of_time(kind, worker):
    """Of a processor, also in one operation of C; the next one is rendered."""
    began = time.monotonic()
    with pytest.raises(RejectedTemplateError, match=f"takes more than {SECONDS} seconds"):
        render(worker, TIME[kind])
    assert time.monotonic() - began < 60
    assert render(worker, GOOD)[0] == "hiho"


def test_a_template_that_asks_for_too_much_is_not_asked_again(worker):
    """Its ten first conversations would take ten times as long; control: another one is asked."""
    for _ in range(2):
        with pytest.raises(RejectedTemplateError, match="MiB of memory"):
            render(worker, "{% set n = messages | length * 10 ** 10 %}{{ 'b' * n }}")
    assert worker._process is None
    assert render(worker, GOOD)[0] == "hiho"
    assert worker._process is not None


def test_a_constant_that_takes_all_time_is_refused_when_it_is_compiled(worker):
    """jinja2 computes constants then; control: a small one."""
    with pytest.raises(RejectedTemplateError, match="takes more than"):
        worker.check("{{ 9 ** (9 ** 9) }}")
    assert worker.check("{{ 9 ** 9 }}") == {"writes_date": False, "marks_turns": False}


def test_a_large_text_is_refused():
    """By its length, with the limit; and a large template before it is compiled."""
    with pytest.raises(BadConversationError, match="70,000,000 characters, above the limit"):
        ChatTemplate("{{ 'a' * (messages | length * 35000000) }}", "file").render(MESSAGES)
    with pytest.raises(DataError, match=r"1,048,577 characters, above the limit of 1,048,576"):
        ChatTemplate("a" * (MAX_SOURCE + 1), "file")


def test_a_process_that_somebody_ends_is_started_again():
    """Between two requests: no error; one that was started before a fork is not used after it."""
    template = ChatTemplate(GOOD, "good")
    assert template.render(MESSAGES) == "hiho"
    os.kill(WORKER._process.pid, signal.SIGKILL)
    assert template.render(MESSAGES) == "hiho"
    before = WORKER._process
    WORKER._owner = -1
    assert template.render(MESSAGES) == "hiho"
    assert WORKER._process is not before
    before.kill()
    before.communicate()


def test_values_arrive_as_they_are():
    """Texts of any characters, numbers, null, lists and objects, and tools; control: the text is theirs."""
    content = "é\u2028\0\n\"'{{ }} \U0001f600 \ud800"
    message = {"role": "user", "content": content, "n": [1, 2.5, None, True, {"a": "b"}]}
    source = "{{ messages[0].content }}|{{ messages[0].n | tojson }}|{{ tools | tojson }}"
    found = ChatTemplate(source, "x").render([message], tools=[{"name": "f"}])
    assert found == content + '|[1, 2.5, null, true, {"a": "b"}]|[{"name": "f"}]'


def test_the_sandbox_is_still_one():
    """Attributes of Python's are refused in the process as well."""
    for source in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
    ):
        with pytest.raises(BadConversationError, match="the template fails: SecurityError"):
            ChatTemplate(source, "x").write(Conversation(tuple(MESSAGES)))
