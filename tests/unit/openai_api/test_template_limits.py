"""Templates that are known to be harmless are rendered here, all others in forks with limits."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from openai_api.chat_template import ChatTemplate
from openai_api.template_check import find_doubt
from openai_api.template_process import Job, TemplateProcess
from openai_api.template_render import parse_template
from runtime.errors import InvalidRequest, Overloaded, StartupError
from tests.support.processes import alive
from tests.support.server import ROOT
from tests.support.waiting import until

FOLDER = ROOT / "tests" / "support" / "chat_templates"
DEMO = ROOT / "headrace" / "demo" / "model" / "chat_template.jinja"
OURS = sorted((ROOT / "openai_api" / "templates").glob("*.jinja"))
MESSAGES = [{"role": "user", "content": "What is a mill?"}]

HARMLESS = [
    "{{ messages | tojson(indent=4) }}",
    "{{ messages | map(attribute='content') | join(', ') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ (messages | rejectattr('role', 'in', ['tool']) | first).content | trim | upper }}",
    "{{ {'role': messages[0].role, 'n': [1, messages | length]} | tojson }}",
    "{{ '%s: %d' % (messages[0].role, 7) }}",
    "{{ '-' * 20 }}{{ '  ' * loop_depth }}",
    "{{ strftime_now('%d %b %Y') }}",
    "{% set ns = namespace(n=0, s='') %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}"
    "{% if ns.n % 2 == 0 %}{% set ns.s = ns.s + m.content %}{% endif %}{% endfor %}{{ ns.s }}",
    "{% macro one(m, end='.') %}{{ m.content ~ end }}{% endmacro %}"
    "{% macro two(m) %}{{ one(m) + one(m, end='!') }}{% endmacro %}{{ two(messages[0]) }}",
    "{% for m in messages if m.role in ('user', 'tool') %}{{ loop.index0 * 2 }}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "{% set a, b = messages[0].role, 'x' %}{{ a ~ b }}",
    "{% generation %}{{ bos_token + messages[0].content }}{% endgeneration %}",
    "{% filter trim %} a {% endfilter %}{% set text %}b{% endset %}{{ text }}",
    "{{ messages[0].content.split(' ')[-1].replace('?', '').strip('l') }}",
]
DOUBTFUL = [
    "{{ messages | tojson(indent=2000000000) }}",
    "{{ messages | tojson(indent=n) }}",
    "{{ messages | slice(300000000) | list }}",
    "{{ messages | batch(2) | list }}",
    "{{ messages[0].content.translate({97: 'x'}) }}",
    "{{ messages[0].content.ljust(10) }}",
    "{{ messages[0].content.format(1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ messages[0].content | center(10) }}",
    "{{ messages[0].content | indent(10) }}",
    "{{ messages | sort | list }}",
    "{{ messages | map('center', 10) | list }}",
    "{{ messages | map(name) | list }}",
    "{{ messages | join(messages[0].content) }}",
    "{{ messages | sum(start=[]) }}",
    "{{ 2 ** 10 }}",
    "{{ a * b }}",
    "{{ messages * 1000 }}",
    "{{ 1000000000 * (a | length) }}",
    "{{ a % b }}",
    "{{ messages + messages }}",
    "{% set x = [a, a] %}",
    "{% set x = {'a': a} %}",
    "{% set x, y = [a], [b] %}",
    "{% set ns = namespace(l=[]) %}{% set ns.l = ns.l + [1] %}",
    "{% set ns = namespace(n=2) %}{% for m in messages %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{% for i in range(10) %}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}",
    "{% macro f(n) %}{{ g(n) }}{% endmacro %}{% macro g(n) %}{{ n }}{% endmacro %}",
    "{% macro f(n) %}{{ varargs }}{% endmacro %}",
    "{% set namespace = messages[0].content.translate %}{{ namespace(a=1) }}",
    "{% for message in messages recursive %}{{ loop(message) }}{% endfor %}",
    "{{ f(*messages) }}",
    "{{ (messages | attr('append'))(1) }}",
    "{{ messages[0]['content']['translate'](1) }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% block a %}{% endblock %}",
    "{% call f() %}{% endcall %}",
    "{{ cycler(1, 2) }}",
    "{{ strftime_now('%1000000000d') }}",
    "{{ strftime_now(a) }}",
    "{% for a in x %}{% for b in x %}{% for c in x %}{% for d in x %}{% for e in x %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endfor %}{% endfor %}",
    "{{ x is divisibleby(3) }}",
]


def doubt(source: str) -> str | None:
    return find_doubt(parse_template(source, "default"))


@pytest.fixture(scope="module")
def process() -> TemplateProcess:
    return TemplateProcess()


@pytest.mark.parametrize("path", [*FOLDER.glob("*.jinja"), *OURS, DEMO], ids=lambda path: path.stem)
def test_usual_templates_are_harmless(path: Path) -> None:
    assert doubt(path.read_text()) is None


@pytest.mark.parametrize("source", HARMLESS)
def test_what_is_harmless(source: str, process: TemplateProcess) -> None:
    assert doubt(source) is None
    # Known, and right: the same text from the process that could do all of it.
    variables: dict[str, Any] = {"messages": MESSAGES, "bos_token": "<s>", "loop_depth": 2}
    template = ChatTemplate(source, {"bos_token": "<s>"})
    here = template.render(MESSAGES, variables={"loop_depth": 2})
    assert here == process.ask(Job(source, "t", variables, 10_000)).text


@pytest.mark.parametrize("source", DOUBTFUL)
def test_what_is_not_known_to_be_harmless(source: str) -> None:
    found = doubt(source)
    assert found is not None
    assert found.startswith("line 1 uses ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson(indent=2000000000) }}",
        "{{ messages | slice(300000000) | list }}",
        "{{ [1] | slice(300000000) | list }}",
        "{{ ('a' * 9000 * 900).translate({97: 'x' * 1000}) | length }}",
        "{% set ns = namespace(x=3) %}{% for i in range(9) %}{% set ns.x = ns.x ** 999 %}"
        "{% endfor %}",
    ],
)
def test_what_costs_too_much_is_refused_and_costs_this_process_nothing(source: str) -> None:
    used_s, peak_kb = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # What is constant costs it when it is compiled, and the server does not start. On a busy
    # machine it may not get the time that would show what it costs.
    with pytest.raises((InvalidRequest, StartupError, Overloaded), match=r"[Cc]hat template"):
        ChatTemplate(source).render(MESSAGES)
    assert time.process_time() - used_s < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kb < 50_000


def test_the_depth_of_a_value_counts_where_it_is_indented() -> None:
    # Of 2 MB in the request an indentation makes 2 GB.
    value: list[Any] = []
    for _ in range(900):
        value = [value]
    source = "{{ messages | tojson(indent=4) }}"
    assert doubt(source) is None
    started = time.thread_time()
    with pytest.raises(InvalidRequest, match="longer than"):
        ChatTemplate(source).render([{"role": "user", "content": [value] * 1000}])
    assert time.thread_time() - started < 5


def test_a_replacement_counts_before_it_is_made() -> None:
    messages = [{"role": "user", "content": "a" * 1_000_000}]
    for call in ("messages[0].content.replace('a', b)", "messages[0].content | replace('a', b)"):
        with pytest.raises(InvalidRequest, match="longer than"):
            ChatTemplate(f"{{{{ ({call}) | length }}}}").render(
                messages, variables={"b": "b" * 1_000_000}
            )


def test_doubtful_templates_say_the_same_words_to_the_user() -> None:
    odd = "{% set x = messages | sort(attribute='role') %}"
    template = ChatTemplate(odd + "{{ x[0].content }}{{ raise_exception('no ' ~ x[0].role) }}")
    with pytest.raises(InvalidRequest, match=r"Chat template error: no user"):
        template.render(MESSAGES)
    with pytest.raises(InvalidRequest, match="expects another shape"):
        ChatTemplate(odd + "{{ x.y.z }}").render(MESSAGES)
    with pytest.raises(InvalidRequest, match="cannot be given these messages"):
        ChatTemplate(odd).render([{"role": "user", "content": 10**30}])
    with pytest.raises(StartupError, match="does not parse, line 1: No filter named 'nothing'"):
        ChatTemplate("{{ messages | nothing }}")
    assert ChatTemplate(odd + "{{ a_name }}").choose(with_tools=False).variables >= {"a_name"}


def test_the_process_is_started_again() -> None:
    process = TemplateProcess()
    job = Job("{{ 1 + 1 }}", "t", {}, 10)
    assert process.ask(job).text == "2"
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert process.ask(job).text == "2"
    assert process.pid != first


def loops(count: int) -> Job:
    source = "{% for a in range(" + str(count) + ") %}{% for b in range(1000) %}{% endfor %}"
    return Job(source + "{% endfor %}{{ 2 }}", "t", {}, 10)


@pytest.mark.slow
def test_a_quick_one_does_not_wait_for_a_slow_one() -> None:
    process, found = TemplateProcess(), list[str | None]()
    assert process.ask(loops(1)).text == "2"
    assert process.pid is not None
    front = psutil.Process(process.pid)
    quick = threading.Thread(target=lambda: found.append(process.ask(loops(3000)).text))
    slow = threading.Thread(target=process.ask, args=[loops(99_999)])
    quick.start()
    until(front.children)
    # Its fork has what the first one's answer goes through.
    slow.start()
    quick.join()
    assert found == ["2"]
    assert front.children()
    slow.join()


def test_the_process_leaves_with_the_front() -> None:
    code = """
import os, signal
from openai_api.template_process import Job, TemplateProcess
process = TemplateProcess()
process.ask(Job("x", "t", {}, 10))
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    pid, deadline = int(found.stdout), time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < deadline, "it was left behind"
        time.sleep(0.05)
