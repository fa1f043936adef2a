import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.data import Batch, Sample, append_response, collate, expand_placeholders, group_ids, prompt_sample
from rlkit.data.placeholders import Expansion, expanded_lengths
from rlkit.data.samples import check_sample

IMAGE, VIDEO = 90, 91
EOS = 2
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


def seen(counts: list[int], group: int = 0) -> Sample:
    """A prompt with one image for each of `counts`; its vision tensors carry the group's number."""
    compact = [1, *[IMAGE] * len(counts), 5]
    grids = torch.tensor([[1, 2, 2 * n] for n in counts]).reshape(-1, 3)
    vision = {"pixel_values": torch.full((4 * sum(counts), 2), float(group)), "image_grid_thw": grids} if counts else {}
    placeholders = {IMAGE: counts} if counts else {}
    expanded = [1, *[IMAGE] * sum(counts), 5]
    return prompt_sample(expanded, compact, vision=vision, placeholders=placeholders, group_id=group)


def answered(counts: list[int], tokens: list[int], group: int = 0, **facts) -> Sample:
    return append_response(seen(counts, group), tokens, [-0.5 - t for t in tokens], **facts)


def test_prompt_is_not_trained_on():
    sample = prompt_sample((3, 4, 5), group_id=7, row={"answer": "x"})
    assert sample.token_ids == sample.compact_ids == [3, 4, 5]
    assert sample.mask == [False] * 3 and sample.logprobs == [0.0] * 3 and sample.response_ids == []
    assert sample.group_id == 7 and math.isnan(sample.reward) and sample.row == {"answer": "x"}


def test_extend_leaves_its_argument_alone():
    before = seen([3], group=4)
    kept = copy.deepcopy(before.token_ids), copy.deepcopy(before.compact_ids)
    after = append_response(before, [7, EOS], [-1.0, -2.0], text="hi", finish_reason="stop", version=3)
    assert (before.token_ids, before.compact_ids) == kept and not any(before.mask)
    assert after.token_ids == [1, IMAGE, IMAGE, IMAGE, 5, 7, EOS] and after.compact_ids == [1, IMAGE, 5, 7, EOS]
    assert after.mask == [False] * 5 + [True] * 2 and after.logprobs == [0.0] * 5 + [-1.0, -2.0]
    assert after.response_ids == [7, EOS]
    assert (after.text, after.finish_reason, after.version, after.group_id) == ("hi", "stop", 3, 4)
    assert after.vision is before.vision
    check_sample(after)


def test_extend_refuses_what_would_break_the_next_forward():
    with pytest.raises(ValueError, match="logprobs: expected one for each sampled token, got 1 for 2"):
        append_response(seen([2]), [7, 8], [-1.0])
    with pytest.raises(ValueError, match=r"token_ids: expected no image placeholder .*, got \[90\]"):
        append_response(seen([2]), [7, IMAGE], [-1.0, -1.0])


def test_expand_golden():
    assert expand_placeholders([1, IMAGE, 2, IMAGE, 3], {IMAGE: [2, 1]}) == [1, IMAGE, IMAGE, 2, IMAGE, 3]
    assert expand_placeholders([IMAGE, VIDEO, IMAGE], {IMAGE: [1, 2], VIDEO: [3]}) == [
        IMAGE,
        VIDEO,
        VIDEO,
        VIDEO,
        IMAGE,
        IMAGE,
    ]
    assert expand_placeholders([1, 2], {}) == [1, 2] and expand_placeholders([], {}) == []
    with pytest.raises(ValueError, match="expected 2 placeholders of token 90, got 1"):
        expand_placeholders([1, IMAGE], {IMAGE: [2, 2]})
    with pytest.raises(ValueError, match="expected 1 placeholders of token 90, got 2"):
        expand_placeholders([IMAGE, IMAGE], {IMAGE: [2]})


def test_expand_with_brackets_and_joined_neighbours():
    """An image between brackets; one whose first token is joined with the text before it; two that go together."""
    brackets = Expansion([7, IMAGE, IMAGE, 8])
    joined = Expansion([6, IMAGE, 8], before=1, after=2)
    assert expand_placeholders([1, IMAGE, 2, IMAGE], {IMAGE: [brackets, 3]}) == [
        1,
        7,
        IMAGE,
        IMAGE,
        8,
        2,
        IMAGE,
        IMAGE,
        IMAGE,
    ]
    assert expand_placeholders([1, 2, IMAGE, 3, 4, 5], {IMAGE: [joined]}) == [1, 6, IMAGE, 8, 5]
    assert expanded_lengths([1, 2, IMAGE, 3, 4, 5], {IMAGE: [joined]}).tolist() == [1, 0, 3, 0, 0, 1]
    expansions = [Expansion([IMAGE, 6, IMAGE], after=1), Expansion([])]
    assert expand_placeholders([1, IMAGE, IMAGE, 2], {IMAGE: expansions}) == [1, IMAGE, 6, IMAGE, 2]


def slow_expand(compact, placeholders):
    left = {token: list(counts) for token, counts in placeholders.items()}
    out = []
    for token in compact:
        out += [token] * (left[token].pop(0) if token in left else 1)
    return out


@given(st.lists(st.one_of(st.integers(0, 9), st.tuples(st.sampled_from([IMAGE, VIDEO]), st.integers(1, 9)))))
@PROPERTY
def test_expand_equals_a_loop(parts):
    compact = [part if isinstance(part, int) else part[0] for part in parts]
    placeholders: dict[int, list[int]] = {IMAGE: [], VIDEO: []}
    for part in parts:
        if not isinstance(part, int):
            placeholders[part[0]].append(part[1])
    assert expand_placeholders(compact, placeholders) == slow_expand(compact, placeholders)


def test_placeholder_expanded_once():
    counts: list[int] = [3]
    sample = seen(counts)
    for turn in range(1, 4):  # response, then the next turn's tokens with one more image
        sample = append_response(sample, [10 + turn, EOS], [-1.0, -1.0])
        check_sample(sample)
        compact = [*sample.compact_ids, 1, IMAGE, 6]
        counts = [*counts, 2 + turn]
        expanded = expand_placeholders(compact, {IMAGE: counts})
        assert expanded.count(IMAGE) == sum(counts) and compact.count(IMAGE) == len(counts)
        assert expanded[: len(sample.token_ids)] == sample.token_ids  # what was there is not expanded again
        new = len(expanded) - len(sample.token_ids)
        sample = Sample(
            expanded, compact, [*sample.mask, *[False] * new], [*sample.logprobs, *[0.0] * new],
            placeholders={IMAGE: counts},
        )  # fmt: skip
        check_sample(sample)
    assert sum(sample.mask) == 6
    batch = collate([sample])
    assert (batch.tokens == IMAGE).sum() == 3 + 3 + 4 + 5
    again = prompt_sample(sample.token_ids[:5], sample.token_ids[:5], placeholders={IMAGE: [3]})
    with pytest.raises(ValueError, match="expected 1 placeholders of token 90, got 3"):  # expanded already
        collate([again])


def test_never_retokenise(tiny_dir):
    from rlkit.vlm import decode, load_processor

    tokenizer = load_processor(tiny_dir).tokenizer
    prompt = tokenizer("What digit is this?")["input_ids"]
    sampled = [tokenizer.convert_tokens_to_ids(letter) for letter in "digit"] + [tokenizer.eos_token_id]
    text = decode(tokenizer, sampled)
    assert text == "digit" and tokenizer(text)["input_ids"] != sampled[:-1]  # the tokenizer would write it otherwise
    first = append_response(prompt_sample(prompt), sampled, [-1.0] * len(sampled), text=text)
    assert first.response_ids == sampled and first.compact_ids == first.token_ids == prompt + sampled
    batch = collate([first])
    assert batch.tokens[0][batch.mask[0]].tolist() == sampled
    assert batch.rollout_logprobs[0].tolist() == [0.0] * len(prompt) + [-1.0] * len(sampled)
    retold = prompt_sample([*prompt, *tokenizer(text)["input_ids"], tokenizer.eos_token_id], first.compact_ids)
    with pytest.raises(ValueError, match="tokenized again"):
        collate([retold])


def test_response_mask_without_eos():
    cut, whole = answered([], [7, 8, 9], finish_reason="length"), answered([], [7, EOS], finish_reason="stop")
    batch = collate([cut, whole], pad_token_id=0)
    assert batch.mask.tolist() == [[False, False, True, True, True], [False, False, True, True, False]]
    assert batch.lengths == [5, 4] and batch.total_tokens == 5


def test_pad_equals_eos():
    samples = [answered([], [7, EOS]), answered([], [EOS]), answered([], [7, 8, 9]), answered([2], [])]
    batch, other = collate(samples, pad_token_id=EOS), collate(samples, pad_token_id=0)
    assert torch.equal(batch.mask, other.mask) and batch.lengths == other.lengths == [4, 3, 5, 4]
    assert torch.equal(batch.attention_mask, other.attention_mask)
    assert batch.mask.sum(1).tolist() == [2, 1, 3, 0]  # an end token that was sampled is trained on, padding is not
    assert (batch.tokens[~batch.attention_mask] == EOS).all()
    assert (batch.total_tokens, batch.total_sequences) == (6, 3)


@pytest.mark.parametrize("name", ["mask", "logprobs"])
def test_check_sample_counts_entries(name):
    sample = answered([2], [7], group=5)
    broken = copy.copy(sample)
    object.__setattr__(broken, name, getattr(sample, name)[:-1])
    with pytest.raises(ValueError, match=f"sample of group 5: {name}: expected 5 entries, one per token, got 4"):
        check_sample(broken)
    with pytest.raises(ValueError, match="group 5"):
        collate([sample, broken])


def test_check_sample_sees_another_token_on_one_track():
    sample = answered([2], [7], group=5)
    sample.compact_ids[-1] = 8
    with pytest.raises(
        ValueError, match="group 5: compact_ids: expected tokens that expand to token_ids .* was text tokenized again"
    ):
        check_sample(sample)


SAMPLES = st.lists(
    st.tuples(st.lists(st.integers(1, 4), max_size=3), st.lists(st.integers(3, 9), max_size=6)), max_size=6
)


@given(SAMPLES, st.integers(0, 9))
@PROPERTY
def test_collate_equals_a_loop(specs, pad):
    samples = [answered(counts, tokens, group) for group, (counts, tokens) in enumerate(specs)]
    batch = collate(samples, pad_token_id=pad)
    width = max((len(s.token_ids) for s in samples), default=1)
    assert batch.tokens.shape == batch.mask.shape == batch.rollout_logprobs.shape == (len(samples), width)
    assert (batch.tokens.dtype, batch.mask.dtype) == (torch.long, torch.bool)
    assert batch.rollout_logprobs.dtype == batch.rewards.dtype == torch.float32
    for b, sample in enumerate(samples):
        for t in range(width):
            real = t < len(sample.token_ids)
            assert batch.tokens[b, t] == (sample.token_ids[t] if real else pad)
            assert batch.mask[b, t] == (real and sample.mask[t])
            assert batch.rollout_logprobs[b, t] == (sample.logprobs[t] if real else 0.0)
            assert batch.attention_mask[b, t] == real
        assert batch.vision[b] is sample.vision
    assert batch.group_ids.tolist() == group_ids(samples).tolist() == list(range(len(samples)))
    assert batch.total_tokens == sum(len(tokens) for _, tokens in specs)
    assert batch.total_sequences == sum(bool(tokens) for _, tokens in specs)


@given(SAMPLES, st.data())
@PROPERTY
def test_select_moves_everything_of_a_row(specs, data):
    samples = [answered(counts, tokens, group) for group, (counts, tokens) in enumerate(specs)]
    batch = collate(samples, advantages=torch.arange(len(samples), dtype=torch.float32))
    rows = data.draw(st.permutations(range(len(samples))))[: data.draw(st.integers(0, len(samples)))]
    part = batch.select(rows)
    assert len(part) == len(rows) and part.tokens.shape[1] == max((batch.lengths[i] for i in rows), default=1)
    assert part.lengths == [batch.lengths[i] for i in rows]
    assert part.advantages.tolist() == [float(i) for i in rows] and part.group_ids.tolist() == list(rows)
    for row, i in enumerate(rows):
        n = batch.lengths[i]
        assert part.tokens[row, :n].tolist() == samples[i].token_ids
        assert part.mask[row, :n].tolist() == samples[i].mask and not part.mask[row, n:].any()
        assert part.rollout_logprobs[row, :n].tolist() == samples[i].logprobs
        images = sum(n for n in specs[i][0])
        assert (part.tokens[row] == IMAGE).sum() == images
        if images:  # the vision tensors are those of this very row
            assert (part.vision[row]["pixel_values"] == i).all() and len(part.vision[row]["pixel_values"]) == 4 * images
    assert part.total_tokens is batch.total_tokens and part.total_sequences is batch.total_sequences


def test_collate_rewards_and_fields():
    samples = [answered([], [7], reward=1.0), answered([], [7, 8])]
    batch = collate(samples, advantages=torch.tensor([1.0, -1.0]), ref_logprobs=torch.zeros(2, 4))
    assert batch.rewards[0] == 1 and batch.rewards[1].isnan()
    assert batch.advantages.tolist() == [1, -1] and batch.ref_logprobs.shape == (2, 4)
    with pytest.raises(ValueError, match=r"advantages: expected \[2\] or \[2, 4\], got \(3,\)"):
        collate(samples, advantages=torch.zeros(3))


def test_empty_batch():
    batch = collate([], advantages=torch.zeros(0))
    assert len(batch) == 0 and batch.tokens.shape == (0, 1) and batch.tokens.dtype == torch.long
    assert batch.attention_mask.shape == (0, 1) and batch.total_tokens == 0 and batch.total_sequences == 0
    assert len(batch.select([])) == 0 and len(batch.to("cpu")) == 0
    assert len(collate([answered([], [7])]).select([])) == 0


@pytest.mark.parametrize("shape", [(3,), (2, 3), (4, 2), (), (2, 4, 1), (1, 4)])
def test_add_checks_shapes(shape):
    batch = collate([answered([], [7, 8]), answered([], [7])])
    with pytest.raises(ValueError, match=r"returns: expected \[2\] or \[2, 4\], got"):
        batch.add(returns=torch.zeros(shape))
    assert "returns" not in batch.fields


def test_add_returns_the_batch_and_replaces():
    batch = collate([answered([], [7, 8])])
    assert batch.add(returns=torch.zeros(1, 4)) is batch
    assert batch.add(returns=torch.ones(1)).returns.tolist() == [1]


@pytest.mark.parametrize("name", ["mask", "tokens", "lengths", "vision", "attention_mask", "select"])
def test_add_refuses_names_that_would_never_be_read(name):
    batch = collate([answered([], [7, 8])])
    with pytest.raises(ValueError, match=f"fields: expected names that are no attributes of a batch, got '{name}'"):
        batch.add(**{name: torch.zeros(1, 4)})


def test_missing_field_is_an_attribute_error_that_lists_what_is_there():
    batch = collate([answered([], [7])], advantages=torch.zeros(1))
    with pytest.raises(AttributeError, match="its fields .*'advantages'.*'rollout_logprobs'.*, got 'old_logprobs'"):
        _ = batch.old_logprobs
    assert not hasattr(batch, "values") and getattr(batch, "values", None) is None
    again = pickle.loads(pickle.dumps(batch))
    assert torch.equal(again.advantages, batch.advantages) and copy.copy(batch).lengths == batch.lengths


@pytest.mark.parametrize(
    ("tokens", "mask", "lengths", "vision", "message"),
    [
        (torch.zeros(4), torch.zeros(4, dtype=torch.bool), [4], None, "bool"),
        (torch.zeros(1, 4), torch.zeros(1, 3, dtype=torch.bool), [4], None, r"mask torch.bool \(1, 3\)"),
        (torch.zeros(1, 4), torch.zeros(1, 4), [4], None, "mask torch.float32"),
        (torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.bool), [4, 4], None, "expected 1 rows, got 2 and 2"),
        (torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.bool), [4], [{}, {}], "expected 1 rows, got 1 and 2"),
    ],
)
def test_batch_refuses(tokens, mask, lengths, vision, message):
    with pytest.raises(ValueError, match=message):
        Batch(tokens, mask, lengths, vision)


def test_to_keeps_rows_fields_and_totals():
    batch = collate([answered([2], [7, 8], 1), answered([], [7], 2)], advantages=torch.ones(2))
    batch.total_tokens, batch.total_sequences = torch.tensor(100), torch.tensor(20)
    moved = batch.to("meta")
    assert moved.tokens.device.type == moved.advantages.device.type == moved.total_tokens.device.type == "meta"
    assert moved.lengths == batch.lengths and moved.vision == batch.vision and set(moved.fields) == set(batch.fields)
    here = batch.to("cpu").select([1])
    assert here.total_tokens == 100 and here.total_sequences == 20


def test_packed_tensors_follow_their_rows():
    """A number for each token of the mask; rows are selected in any order, more than once, or not at all."""
    mask = torch.tensor([[0, 1, 1], [0, 0, 0], [0, 0, 1], [1, 0, 1]]).bool()
    numbers = torch.tensor([[1, 1], [2, 2], [3, 3], [4, 4], [5, 5]])
    batch = Batch(torch.zeros(4, 3, dtype=torch.long), mask, [3, 1, 3, 3]).add_token_fields(numbers=numbers)
    for rows, expected in (([3, 0], [4, 5, 1, 2]), ([1, 2, 2], [3, 3]), ([1], []), ([], [])):
        part = batch.select(rows)
        assert part.token_fields["numbers"].tolist() == [[x, x] for x in expected] and len(expected) == part.mask.sum()
    flat = torch.tensor([1, 2, 8, 9, 11])  # where the mask is True in [B * T]
    assert batch.trained_token_index(flat).tolist() == [0, 1, 2, 3, 4]
    empty = Batch(torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, 1, dtype=torch.bool), [])
    assert empty.add_token_fields(x=torch.zeros(0, 2)).select([]).token_fields["x"].shape == (0, 2)


def test_a_batch_without_rows_can_be_viewed_as_bytes():
    """As the ranks of a model-parallel group do to compare their rows."""
    batch = collate([])
    assert [x.view(torch.uint8).numel() for x in (batch.tokens, batch.mask, batch.rollout_logprobs)] == [0, 0, 0]


@pytest.mark.parametrize(
    "kept",
    [
        [True, False, True],
        torch.tensor([1, 0, 1]) > 0,
        np.array([1, 0, 1]) > 0,
        [x > 0 for x in torch.tensor([1, 0, 1])],
    ],
    ids=["bools", "tensor", "array", "tensors"],
)
def test_rows_are_selected_by_number_or_by_whether_they_are_kept(kept):
    batch = collate([answered([], [7, 8]), answered([], [7]), answered([], [9, 9])], number=torch.arange(3))
    assert batch.select(kept).number.tolist() == [0, 2] == batch.select(torch.tensor([0, 2])).number.tolist()
    assert len(batch.select([False] * 3)) == 0
    with pytest.raises(ValueError, match="rows: expected a bool for each of the 3 rows, got 2"):
        batch.select(kept[:2])


def test_a_field_that_is_set_is_the_one_that_rows_take_along():
    batch = collate([answered([], [7, 8]), answered([], [7])], advantages=torch.ones(2))
    batch.advantages = 5 * batch.advantages
    assert batch.fields["advantages"].tolist() == [5, 5] == [*batch.select([1, 0]).advantages]
    with pytest.raises(ValueError, match=r"advantages: expected \[2\] or \[2, 4\], got \(3,\)"):
        batch.advantages = torch.ones(3)
    assert len(batch.advantages) == 2


def test_a_mask_that_has_changed_does_not_fit_the_tensors_of_its_tokens():
    batch = collate([answered([], [7, 8]), answered([], [7])])
    batch.add_token_fields(top=torch.zeros(len(batch.mask[batch.mask]), 2))
    batch.mask[0, :] = False
    with pytest.raises(ValueError, match="token_fields: expected . entries of top, .* got .; change mask before add"):
        batch.select([0, 1])
