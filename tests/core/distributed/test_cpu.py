"""The emulation sends what megatron-core places on CUDA to the CPU, and leaves everything else as it is."""

from typing import Any

import pytest
import torch

from mtrain.core.ranks import cpu


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 1)])
def test_tensors_for_cuda_are_made_on_the_cpu(device: Any) -> None:
    assert torch.zeros(2, device=device).device.type == "cpu"
    assert torch.empty_like(torch.zeros(2), device=device).device.type == "cpu"
    assert torch.zeros(2).new_ones(3, device=device).device.type == "cpu"
    assert torch.zeros(2).to(device).device.type == "cpu"
    assert torch.zeros(2).to(device=device, dtype=torch.float64).dtype == torch.float64


def test_other_arguments_mean_what_they_meant() -> None:
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.arange(3, dtype=torch.int16).dtype == torch.int16
    assert torch.full((2,), 7, dtype=torch.int64).tolist() == [7, 7]
    assert torch.zeros(2).to(torch.float16).dtype == torch.float16
    assert torch.zeros(2).type() == "torch.FloatTensor"
    assert torch.zeros(2).type(torch.int32).dtype == torch.int32
    with torch.device("meta"):
        assert torch.zeros(2).device.type == "meta"


def test_pinned_memory_and_transfers_do_nothing() -> None:
    tensor = torch.ones(2, pin_memory=True)
    assert tensor.cuda() is tensor
    assert tensor.pin_memory() is tensor
    module = torch.nn.Linear(2, 2)
    assert module.cuda() is module


def test_streams_and_events_have_always_finished() -> None:
    cuda: Any = torch.cuda
    with cuda.stream(cuda.Stream()):
        event = cuda.current_stream().record_event()
    event.synchronize()
    cuda.current_stream().wait_stream(cuda.default_stream())
    assert cuda.Event(enable_timing=True).elapsed_time(event) == 0.0
    assert cuda.current_device() == 0
    assert cuda.Event().query()


def test_random_states_are_those_of_the_cpu() -> None:
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.cuda.manual_seed(5)
    again = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), again)


def test_megatron_finds_the_type_names_that_it_compares_with() -> None:
    """Only callers in megatron see it: elsewhere the name is torch's own."""
    caller = {"__name__": "megatron.core.optimizer.somewhere", "torch": torch}
    exec("name = torch.zeros(2).type()", caller)
    assert caller["name"] == "torch.cuda.FloatTensor"


def test_cuda_stays_absent_for_those_who_ask() -> None:
    assert not torch.cuda.is_available()


def test_installing_twice_changes_nothing() -> None:
    before = torch.zeros, torch.Tensor.to, torch.cuda.Stream
    cpu.install()
    assert (torch.zeros, torch.Tensor.to, torch.cuda.Stream) == before


def test_nothing_of_megatron_is_compiled() -> None:
    """Nothing is compiled, whether the emulation or megatron-core's data sets were imported first."""
    from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train
    from torch._dynamo.utils import counters

    assert torch.compile.__module__ == "torch"
    before = dict(counters["frames"])
    with torch.enable_grad():
        added = bias_dropout_add_fused_train((torch.ones(2), None), torch.ones(2), 0.0)
    assert added.tolist() == [2.0, 2.0]
    assert dict(counters["frames"]) == before
