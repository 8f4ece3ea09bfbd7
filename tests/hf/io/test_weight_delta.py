"""Parts of a weight sync, and the copy that follows by them, without an engine."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mtrain import DataError, WeightCopy
from mtrain.base.background import started
from mtrain.hf.io.broadcast import send_bytes
from mtrain.hf.io.weight_delta import Change, Part, fingerprint_of, weights_fingerprint
from tests.messages import refuses
from tests.training.engine_parts.hf_ranks import bits_of, group_pair

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.uint8]
DTYPES += [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2]  # mxfp4: torch cannot index these
ENOUGH_S = 600.0
Weights = dict[str, Tensor]


def steps(count: int = 4) -> list[Weights]:
    """Draws weights of some steps: much of one tensor changes each time, and a little of another."""
    torch.manual_seed(1)
    now = {"much": torch.randn(40, 5).bfloat16(), "little": torch.randn(300), "never": torch.ones(3)}
    found = [now]
    for _ in range(count - 1):
        now = {name: tensor.clone() for name, tensor in now.items()}
        now["much"] += 1
        now["little"][7:9] += 1
        found.append(now)
    return found


def sent(weights: list[Weights], session: str = "a trainer") -> list[list[Tensor]]:
    """Returns the parts of one sync each: a part for every tensor, and the end."""
    held: Weights = {}
    prints: dict[str, str] = {}
    found = []
    for number, now in enumerate(weights, 1):
        head = Part(session, number, is_full=number == 1)
        changes = [Change.between(name, held.get(name), tensor) for name, tensor in now.items()]
        for change in filter(None, changes):
            held[change.name] = now[change.name].clone()
            prints[change.name] = change.fingerprint
        end = head._replace(weights=weights_fingerprint(prints))
        found.append([head._replace(changes=[each]).encoded() for each in changes if each] + [end.encoded()])
    return found


def applied(copy: WeightCopy, parts: list[Tensor]) -> Weights:
    return dict(itertools.chain.from_iterable(copy.apply(each) for each in parts))


def is_same(copy: WeightCopy, weights: Mapping[str, Tensor]) -> bool:
    """Compares names, kinds and bits."""
    assert list(copy.tensors) == list(weights)
    pairs = [(copy.tensors[name], tensor) for name, tensor in weights.items()]
    return all((a.dtype, a.shape, bits_of(a)) == (b.dtype, b.shape, bits_of(b)) for a, b in pairs)


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]),
    st.integers(0, 2**32),
)
def test_a_change_makes_the_old_tensor_the_new_one(
    dtype: torch.dtype, shape: list[int], part: float, seed: int
) -> None:
    """Any bits come through, nan and -0 too; and nothing is sent where no bit has changed."""
    random = torch.Generator().manual_seed(seed)
    bits = torch.randint(256, (torch.Size(shape).numel() * 40, dtype.itemsize), dtype=torch.uint8, generator=random)
    old = bits.view(dtype).view(40, *shape)
    flips = (torch.rand(len(bits), generator=random) < part).to(torch.uint8)
    new = (bits ^ flips[:, None]).view(dtype).view(old.shape)
    held = old.clone()
    change = Change.between("any", held, new)
    assert (change is None) == (not flips.any())
    assert bits_of(held) == bits_of(new)
    if change is not None:
        (read,) = Part.decoded(Part("", 1, False, [change]).encoded()).changes
        after = read.applied(old)
        assert after is not None
        assert (after.dtype, after.shape, bits_of(after)) == (new.dtype, new.shape, bits_of(new))
        assert read.fingerprint == fingerprint_of(new)
        assert read.positions.nbytes + read.values.nbytes <= new.nbytes


@pytest.mark.parametrize(
    ("every", "form", "num_bytes"),
    [
        (1, "whole", 20_000),
        (2, "mask", 1_250 + 10_000),  # gaps would take 5,000
        (10, "uint8", 1_000 + 2_000),
        (255, "uint8", 40 * 3),
        (256, "uint16", 40 * 4),
    ],
)
def test_places_take_the_fewest_bytes(every: int, form: str, num_bytes: int) -> None:
    new = torch.zeros(10_000, dtype=torch.bfloat16)
    new[::every] = 1
    change = Change.between("any", torch.zeros_like(new), new)
    assert change is not None
    assert (change.form, change.positions.nbytes + change.values.nbytes) == (form, num_bytes)


def test_a_copy_follows_and_returns_what_has_changed() -> None:
    copy, weights = WeightCopy(), steps()
    for number, (now, parts) in enumerate(zip(weights, sent(weights), strict=True), 1):
        found = applied(copy, parts)
        assert list(found) == [name for name in now if number == 1 or name != "never"]
        assert all(bits_of(found[name]) == bits_of(now[name]) for name in found)
        assert is_same(copy, now)
        assert copy.sync == number


def broken(part: Tensor, place: int) -> Tensor:
    found = part.clone()
    found[place] ^= 1
    return found


# what is done with [first, second, third] sync, after the first was applied -> the part that is refused
WRONG: dict[str, Callable[[list[list[Tensor]]], list[Tensor]]] = {
    "a sync is lost": lambda syncs: syncs[2][:1],
    "a sync comes twice": lambda syncs: [*syncs[1], syncs[1][0]],
    "the first sync comes twice": lambda syncs: [*syncs[1], syncs[0][0]],
    "a part is lost": lambda syncs: syncs[1][1:],
    "the last part is lost": lambda syncs: [*syncs[1][:-1], syncs[2][0]],
    "two syncs are mixed": lambda syncs: [syncs[1][0], syncs[2][0]],
    "a sync of another sender": lambda syncs: sent(steps(), "another trainer")[1][:1],
    "a description is damaged": lambda syncs: [broken(syncs[1][0], 60)],
    "a digest is damaged": lambda syncs: [broken(syncs[1][0], 3)],
    "a length is damaged": lambda syncs: [broken(syncs[1][0], 33)],
    "a value is damaged": lambda syncs: [broken(syncs[1][0], -20)],
    "a part is cut": lambda syncs: [syncs[1][0][:-16]],
    "a description is cut": lambda syncs: [syncs[1][0][:20]],
    "nothing came": lambda syncs: [syncs[1][0][:0]],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_follow_is_refused_and_a_full_sync_helps(name: str) -> None:
    """The last part is refused by one sentence; no tensor has values that the trainer's never had."""
    copy, weights = WeightCopy(), steps()
    syncs = sent(weights)
    applied(copy, syncs[0])
    *fine, wrong = WRONG[name](syncs)
    applied(copy, fine)
    number = copy.sync
    with refuses(DataError):
        copy.apply(wrong)
    assert copy.sync == number
    for key, tensor in copy.tensors.items():
        assert any(bits_of(tensor) == bits_of(each[key]) for each in weights)
    full = Part("a trainer", 9, is_full=True)
    changes = [change for key, tensor in weights[3].items() if (change := Change.between(key, None, tensor))]
    end = weights_fingerprint({each.name: each.fingerprint for each in changes})
    applied(copy, [full._replace(changes=changes).encoded(), full._replace(weights=end).encoded()])
    assert is_same(copy, weights[3])
    assert copy.sync == 9


@pytest.mark.parametrize("name", ["a sync comes twice", "a value is damaged", "a part is cut", "nothing came"])
def test_a_copy_goes_on_after_a_part_that_was_not_applied(name: str) -> None:
    copy, weights = WeightCopy(), steps()
    syncs = sent(weights)
    applied(copy, syncs[0])
    *fine, wrong = WRONG[name](syncs)
    applied(copy, fine)
    with pytest.raises(DataError):
        copy.apply(wrong)
    for parts in syncs[copy.sync :]:
        applied(copy, parts)
    assert is_same(copy, weights[3])


def test_a_copy_that_was_changed_is_refused() -> None:
    """The fingerprint is that of the whole tensor: places that no part names are read, too."""
    copy, weights = WeightCopy(), steps()
    syncs = sent(weights)
    applied(copy, syncs[0])
    copy.tensors["little"][200] += 1
    with refuses(DataError):
        applied(copy, syncs[1])


def test_the_end_of_a_sync_proves_all_tensors() -> None:
    copy, syncs = WeightCopy(), sent(steps())
    del syncs[0][2]
    with refuses(DataError):
        applied(copy, syncs[0])
    with refuses(DataError):
        applied(copy, syncs[1])


def test_places_outside_of_a_tensor_are_refused() -> None:
    old, new = torch.zeros(1000), torch.zeros(1000)
    new[3] = 1
    change = Change.between("any", old.clone(), new)
    assert change is not None
    assert change.applied(old[:2]) is None
    assert change._replace(positions=torch.tensor([255, 255, 255], dtype=torch.uint8)).applied(old) is None
    copy = WeightCopy()
    applied(copy, sent([{"any": old}])[0])
    far = change._replace(positions=torch.tensor([232, 3], dtype=torch.uint8), form="uint16")  # 1,000
    with refuses(DataError):
        copy.apply(Part("a trainer", 2, False, [far]).encoded())


def test_another_version_is_refused() -> None:
    text = json.dumps({"version": 9}).encode()
    part = hashlib.sha256(text).digest() + len(text).to_bytes(8, "little") + text
    with refuses(DataError):
        WeightCopy().apply(torch.frombuffer(bytearray(part), dtype=torch.uint8))


def test_parts_come_through_a_group_and_a_refusal_leaves_it_usable() -> None:
    sender, receiver = group_pair()
    copy, weights = WeightCopy(), steps()
    syncs = sent(weights)
    end = torch.empty(0, dtype=torch.uint8)

    def through(parts: list[Tensor]) -> list[str]:
        found = started(lambda: [name for name, _ in copy.receive(receiver)], "receiver")
        for each in [*parts, end]:
            send_bytes(each, sender, torch.device("cpu"))
        return found.result(ENOUGH_S)

    assert through(syncs[0]) == list(weights[0])
    with pytest.raises(DataError, match="sync 2 of this sender is next"):
        through(syncs[2])
    assert through(syncs[1]) == ["much", "little"]
    assert through([]) == []
    assert is_same(copy, weights[1])
