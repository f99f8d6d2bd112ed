"""`select`: checks T52 to T54 and T56."""

from typing import Any

import pytest

import headrace as sgl
from headrace import function, gen, select
from headrace.lang.backend.classic_select import own_tokens
from tests.support.lang_server import LangServer, meta

METHODS = [
    sgl.token_length_normalized,
    sgl.greedy_token_selection,
    sgl.unconditional_likelihood_normalized,
]
TAIL = [[-0.01, 9, None]] * 5
CONDITIONAL: list[list[Any]] = [
    [[-0.1, 1, None]],
    [[-0.1, 1, None], [-0.3, 2, None]],
    [[-0.4, 1, None], [-0.25, 2, None], [-0.1, 3, None], *TAIL],
]
UNCONDITIONAL: list[list[Any]] = [
    [[None, 1, None]],
    [[None, 1, None], [-1.4, 2, None]],
    [[None, 1, None], [-0.25, 2, None], [-0.1, 3, None], *TAIL],
]
# Of the prompt "The sky is": entries of its last two tokens, the first always null.
BOUNDARY = [[None, 1, " sky"], [-2.0, 2, " is"]]


def scored(*tokens: tuple[float, str]) -> dict[str, Any]:
    entries = [*BOUNDARY, *([logprob, 10 + i, text] for i, (logprob, text) in enumerate(tokens))]
    return {"text": "", "meta_info": {**meta(""), "input_token_logprobs": entries}}


def decide(method: Any) -> Any:
    return method(
        choices=["A", "B", "C"],
        normalized_prompt_logprobs=[-0.1, -0.2, -0.05],
        input_token_logprobs=CONDITIONAL,
        output_token_logprobs=[[], [], []],
        unconditional_token_logprobs=UNCONDITIONAL,
    )


@pytest.mark.parametrize(("method", "decision"), list(zip(METHODS, "CAB", strict=True)))
def test_t53_three_methods(method: Any, decision: str) -> None:
    assert decide(method).decision == decision


def test_t53_the_numbers_that_led_there() -> None:
    matrix = decide(sgl.greedy_token_selection).meta_info["greedy_logprob_matrix"]
    assert matrix[0] == pytest.approx([-0.1] * 8)
    assert matrix[1] == pytest.approx([-0.1, -0.3] + [-0.2] * 6)
    gains = decide(METHODS[2]).meta_info["normalized_unconditional_prompt_logprobs"]
    assert gains == pytest.approx([-0.1, 0.5, -0.05])


@function
def sky(s: sgl.ProgramState, method: Any = sgl.token_length_normalized) -> None:
    s += "The sky is"
    s += select("colour", [" blue", " green"], choices_method=method)
    s += "."


def answer(payload: dict[str, Any]) -> Any:
    if "input_ids" in payload:
        return [scored() for _ in payload["input_ids"]]
    return [scored((-0.5, " blue")), scored((-0.1, " gre"), (-1.9, "en"))]


@pytest.mark.usefixtures("endpoint")
@pytest.mark.parametrize("method", METHODS)
def test_t52_the_requests(stub: LangServer, method: Any) -> None:
    stub.answer = answer
    state = sky.run(method)
    assert state.error() is None
    first, second, *third = stub.payloads
    assert first == {"text": "The sky is", "sampling_params": {"max_new_tokens": 0}}
    # The stub counts words: P is 3, and L is P - 2.
    assert second == {
        "text": ["The sky is blue", "The sky is green"],
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "return_text_in_logprobs": True,
        "logprob_start_len": 1,
    }
    assert len(third) == method.requires_unconditional_logprobs
    if third:
        assert third[0]["input_ids"] == [[10], [10, 11]]


@pytest.mark.usefixtures("endpoint")
def test_only_the_choices_own_tokens_count(stub: LangServer) -> None:
    stub.answer = answer
    state = sky()
    assert state["colour"] == " blue"
    assert state.text() == "The sky is blue."
    info = state.get_meta_info("colour")
    assert info["normalized_prompt_logprobs"] == pytest.approx([-0.5, -1.0])
    assert info["input_token_logprobs"][1] == [[-0.1, 10, " gre"], [-1.9, 11, "en"]]


def test_t54_boundaries() -> None:
    null, merged = [None, 1, " sky"], [-2.0, 3, " blue"]
    own = [-0.5, 10, "blue"]
    # The prompt's last token stands alone, or has merged with the choice.
    assert own_tokens([null, [-2.0, 2, " "], own], "blue", 9) == [own]
    assert own_tokens([null, merged], "blue", 9) == [merged]
    # Identical last tokens of the prompt.
    assert own_tokens([[None, 2, " "], [-2.0, 2, " "], own], "blue", 9) == [own]
    # A prompt of one token, and none.
    assert own_tokens([[None, 2, " "], own], "blue", 1) == [own]
    assert own_tokens([[None, 3, " blue"]], "blue", 1) == [[None, 3, " blue"]]
    assert own_tokens([[None, 10, "blue"]], "blue", 0) == [[None, 10, "blue"]]


@pytest.mark.usefixtures("endpoint")
@pytest.mark.parametrize("method", METHODS)
def test_t54_an_empty_prompt(stub: LangServer, method: Any) -> None:
    @function
    def ask(s: sgl.ProgramState) -> None:
        s += select("c", ["a", "b"], choices_method=method)

    def lone(_: dict[str, Any]) -> Any:
        one = {"text": "", "meta_info": {"input_token_logprobs": [[None, 1, "a"]]}}
        return [one, one]

    stub.answer = lone
    assert ask()["c"] == "a"


@pytest.mark.usefixtures("endpoint")
def test_t56_choices_that_are_allowed_and_not(stub: LangServer) -> None:
    for wrong in ([], None, "abc"):
        with pytest.raises(ValueError, match="choices"):
            select("c", wrong)
    with pytest.raises(ValueError, match="choices"):
        gen("c", choices=[])
    with pytest.raises(ValueError, match="temperature"):
        select("c", ["a"], temperature=0.7)
    with pytest.raises(ValueError, match="greedy_token_selection"):
        select("c", ["a"], choices_method="unheard")
    with pytest.raises(TypeError):
        select("c", ["a", 1])  # type: ignore[list-item]

    @function
    def ask(s: sgl.ProgramState, choices: list[str]) -> None:
        s += "x" + gen("c", choices=choices, choices_method="greedy_token_selection")

    stub.answer = lambda payload: [scored((-1.0, "a")) for _ in payload["text"]]
    for choices in (["a"], ["a", "a"], ["", "a"]):
        assert ask(choices).text() == "x" + choices[0]
