"""Templates that attack: each is refused in bounded time, whatever it does, and the next conversation is rendered."""

from __future__ import annotations

import os
import pickle
import signal
from itertools import accumulate
from pathlib import Path

import pytest

from mtrain.base.errors import DataError
from mtrain.data.chat.sandbox import CLOSE, OPEN, Cut, NotRendered, Rendered, Renderer, RenderLimits, Sandbox
from mtrain.data.chat.spans import refused
from tests.fault_table import Notice
from tests.messages import refuses

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LIMITS = RenderLimits(cpu_s=0.5, wall_s=60.0, memory_bytes=1 << 28, max_chars=1 << 20)
WHOLE = Cut(2, False)
HOSTILE = {
    "an endless loop": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "takes more than 0.5 s of processor time",
    ),
    "a huge range": ("{% for a in range(10 ** 9) %}{% endfor %}", "Range too big"),
    "a large number of many digits": ("{{ (messages | length) ** (10 ** 9) }}", "takes more than 0.5 s"),
    "a long text": ("{{ messages[0].content * 10 ** 10 }}", "more memory than it may have"),
    "a long constant": ("{{ 'a' * 10 ** 10 }}", "more memory than it may have"),
    "a text that doubles": (
        "{% set x = namespace(v='ab') %}{% for a in range(64) %}{% set x.v = x.v ~ x.v %}{% endfor %}",
        "more memory than it may have|takes more than 0.5 s",
    ),
    "a wide format": ("{{ '{:>10000000000}'.format(1) }}", "more memory than it may have"),
    "much output": ("{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "writes more than 1048576 characters"),
    "a list that holds all": (
        "{% set x = namespace(v=[0]) %}{% for a in range(64) %}{% set x.v = x.v + x.v %}{% endfor %}",
        "more memory than it may have|takes more than 0.5 s",
    ),
    "an include": ("{% include '/etc/passwd' %}", "no loader"),
    "an import": ("{% from '/etc/passwd' import x %}{{ x }}", "no loader"),
    "a walk over attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "a walk from a global": ("{{ cycler.__init__.__globals__.os.environ }}", "unsafe"),
    "a walk by a filter": ("{{ ('' | attr('__class__')).mro() }}", "unsafe"),
    "a walk by a namespace": ("{{ namespace(__class__=1) }}", "underscore"),
    "a change of the conversation": ("{{ messages.clear() }}", "unsafe"),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "deep brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion|process that renders it die"),
    "chance": ("{{ range(9) | random }}", "No filter named 'random'"),
    "words by chance": ("{{ lipsum() }}", "'lipsum' is undefined"),
    "no end": ("{% for a in messages %}", "is damaged"),
}


@pytest.mark.fault(
    "input",
    "a chat template that loops for ever, fills the memory, includes files or walks over Python's attributes",
    happens="refused within limits of processor time and memory; the process that renders it is another one",
    exit_code=3,
)
@pytest.mark.parametrize("attack", HOSTILE)
def test_an_attack_is_refused(attack: str, notice: Notice) -> None:
    template, expected = HOSTILE[attack]
    with notice, pytest.raises(DataError, match=expected) as caught:
        rendered(Sandbox(template, "T", None, LIMITS))
    assert caught.value.exit_code == notice.exit_code
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def rendered(sandbox: Sandbox) -> str:
    text = Renderer(sandbox, MESSAGES, None, {}).render(WHOLE)
    if isinstance(text, NotRendered):
        raise refused(text)
    return text


def test_after_a_conversation_that_exceeds_a_limit_the_next_one_is_rendered() -> None:
    sandbox = Sandbox("{{ messages[0].content * (2 * 10 ** 6) }}{{ messages[1].content }}", "T", None, LIMITS)
    with refuses(DataError):
        Renderer(sandbox, MESSAGES, None, {}).render(WHOLE)
    assert Renderer(sandbox, [{"content": ""}, MESSAGES[1]], None, {}).render(WHOLE) == "b"


def test_a_process_that_is_killed_is_an_error_and_the_next_request_starts_another() -> None:
    sandbox = Sandbox("{{ messages[0].content }}", "T", None, LIMITS)
    assert Renderer(sandbox, MESSAGES, None, {}).render(WHOLE) == "a"
    assert sandbox.process_id is not None
    os.kill(sandbox.process_id, signal.SIGKILL)
    with refuses(DataError):
        Renderer(sandbox, MESSAGES, None, {}).render(WHOLE)
    assert Renderer(sandbox, MESSAGES, None, {}).render(WHOLE) == "a"


def test_a_copy_and_a_forked_process_have_a_process_of_their_own() -> None:
    sandbox = Sandbox("{{ messages[0].content }}", "T", None, LIMITS)
    Renderer(sandbox, MESSAGES, None, {}).render(WHOLE)
    copy = pickle.loads(pickle.dumps(sandbox))
    assert copy.process_id is None
    assert Renderer(copy, MESSAGES, None, {}).render(WHOLE) == "a"
    own = sandbox.process_id
    child = os.fork()
    if child == 0:
        is_right = Renderer(sandbox, MESSAGES, None, {}).render(WHOLE) == "a" and sandbox.process_id not in (None, own)
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert Renderer(sandbox, MESSAGES, None, {}).render(WHOLE) == "a", "the parent's process is still there"


def test_a_long_conversation_passes_through_the_pipes() -> None:
    """The conversation is longer than the buffers of both directions together."""
    text = "é🙂" * 200_000
    sandbox = Sandbox("{{ messages[0].content }}", "T", None, RenderLimits())
    found = Renderer(sandbox, [{"content": text}, {}], None, {}).render(WHOLE)
    assert found == text


@pytest.mark.parametrize("marked", [pytest.param(False, marks=pytest.mark.nightly), True])  # without the marks
def test_a_long_conversation_is_rendered_at_each_of_its_messages(marked: bool) -> None:
    """The conversation has 200 turns of 1.7 KB: all renderings together are longer than the limit of what is sent."""
    messages = [{"role": "user", "content": f"{number} " + "x" * 850} for number in range(400)]
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    cuts = [Cut(400, False, marked), *(Cut(n, prompt, marked) for n in range(400) for prompt in (True, False))]
    first, *found = Renderer(Sandbox(template, "T", None, RenderLimits()), messages, None, {}).compare(cuts)
    marks = (OPEN, CLOSE) if marked else ("", "")
    whole = [message["content"].join(marks) for message in messages]
    assert first == Rendered(0, "".join(whole))
    ends = list(accumulate(map(len, whole), initial=0))
    assert found == [Rendered(ends[cut.num_messages], "") for cut in cuts[1:]]
    assert sum(ends[cut.num_messages] for cut in cuts) > RenderLimits().max_chars


def test_renderings_that_differ_too_much_are_refused() -> None:
    template = "{{ messages | length }}" + "a" * 1000000
    sandbox = Sandbox(template, "T", None, RenderLimits(max_chars=1 << 21))
    with refuses(DataError, "2097152"):
        Renderer(sandbox, MESSAGES, None, {}).compare([WHOLE, Cut(1, False), Cut(0, False)])


def test_nothing_of_the_environment_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTRAIN_SECRET_OF_A_TEST", "x")
    sandbox = Sandbox("a", "T", None, LIMITS)
    Renderer(sandbox, MESSAGES, None, {}).render(WHOLE)
    assert b"MTRAIN_SECRET_OF_A_TEST" not in Path(f"/proc/{sandbox.process_id}/environ").read_bytes()


def test_what_is_no_json_is_refused() -> None:
    with refuses(DataError):
        Renderer(Sandbox("a", "T", None, LIMITS), [{"content": b"bytes"}], None, {}).render(WHOLE)


def test_a_process_that_does_not_run_is_given_up() -> None:
    sandbox = Sandbox("{{ messages[0].content }}", "T", None, RenderLimits())
    assert Renderer(sandbox, MESSAGES, None, {}).render(WHOLE) == "a"
    assert sandbox.process_id is not None
    os.kill(sandbox.process_id, signal.SIGSTOP)
    sandbox.limits = RenderLimits(wall_s=0.5)
    with refuses(DataError, "0.5"):
        Renderer(sandbox, [{"content": "a" * 10**6}, {}], None, {}).render(WHOLE)
    assert sandbox.process_id is None
