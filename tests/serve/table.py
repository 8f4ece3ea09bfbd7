"""Measures every call of a client under each layout against the oracle: `python -m tests.serve.table` prints the table
of docs/training/serve.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tinker import types
from torch import Tensor

from mtrain.serve.operations import Lora
from mtrain.serve.served import Served
from tests.parity.cases import Case
from tests.parity.compare import relative
from tests.parity.expert_models import MIXTRAL
from tests.paths import ROOT
from tests.pool import Pool
from tests.serve.oracle import LOSSES, Oracle
from tests.serve.service import datum, running, sequences, session
from tests.serve.test_clients import ADAM, LAYOUTS, LENGTHS, VOCAB, inputs_of, named, saved, worst

PROMPT = [3, 4, 5]
PAGE = ROOT / "docs" / "training" / "serve.md"


def column(one: Case) -> str:
    """Returns the heading of a layout's column."""
    return {"one": "one rank", "dp2-ep2": "dp2-ep2, experts"}.get(named(one), named(one))


def printed() -> dict[str, dict[str, float]]:
    """Returns the page's table: the deviation of each call, by heading."""
    text = PAGE.read_text()
    heading, _, *rows = text[text.index("| call | one rank |") :].partition("\n\n")[0].splitlines()
    names = [each.strip() for each in heading.split("|")[2:-1]]
    cells = [[each.strip() for each in row.split("|")[1:-1]] for row in rows]
    return {name: {row[0]: float(row[place]) for row in cells} for place, name in enumerate(names, 1)}


def apart(found: Sequence[Any], exact: Sequence[Tensor]) -> float:
    """Returns the largest difference of log-probabilities, in nats."""
    pairs = zip(found, exact, strict=True)
    return max(float(np.abs(np.asarray(ours) - theirs.detach().numpy()).max()) for ours, theirs in pairs)


def log_probs_of(output: Any) -> list[Any]:
    return [each["logprobs"].to_numpy() for each in output.loss_fn_outputs]


def squares(data: Any, log_probs: Any) -> Any:
    """Computes a loss of the client's own."""
    return torch.stack([(each**2).sum() for each in log_probs]).sum(), {}


def measured(pool: Pool, one: Case, folder: Path) -> dict[str, float]:
    """Makes each call under a layout; returns the worst deviation of each."""
    config = one.config(**MIXTRAL if "ep" in one.layout else {})
    found: dict[str, float] = {}
    with running(pool, one, config, folder) as address:
        with session(address) as service:
            whole = service.create_lora_training_client("base", rank=0).result()
            base = saved(folder, whole.save_state("start").result().path, config)
        with session(address) as service:
            adapted = Served(config).adapted(Lora(rank=4))
            client = service.create_lora_training_client("base", rank=4, seed=5).result()
            oracle = Oracle(adapted, base | saved(folder, client.save_state("start").result().path, adapted))
            measure_losses(client, oracle, found)
            measure_custom(client, oracle, found)
            path = client.save_state("end").result().path
            found["save_state"] = worst(saved(folder, path, adapted), oracle)
            again = service.create_training_client_from_state_with_optimizer(path).result()
            measure_rest(again, oracle, found)
    return found


def measure_losses(client: Any, oracle: Oracle, found: dict[str, float]) -> None:
    """Makes two steps with each loss."""
    tokens = sequences(3, LENGTHS, VOCAB)
    for number, loss in enumerate([*LOSSES, *LOSSES]):
        inputs = [inputs_of(loss, each, 10 * number + place) for place, each in enumerate(tokens)]
        data = [datum(each, given) for each, given in zip(tokens, inputs, strict=True)]
        output = client.forward_backward(data, loss).result()
        total, exact = oracle.forward_backward(tokens, loss, inputs)
        num_tokens = sum(map(len, exact))
        deviation = max(apart(log_probs_of(output), exact), abs(output.metrics["loss:sum"] - total) / num_tokens)
        _note(found, f"forward_backward, {loss}", deviation)
        measure_step(client, oracle, found)


def measure_step(client: Any, oracle: Oracle, found: dict[str, float]) -> None:
    """Makes an update."""
    norm = client.optim_step(types.AdamParams(**ADAM)).result().metrics["grad_norm"]
    _note(found, "optim_step, norm of the gradient", relative(norm, oracle.step(ADAM)))


def measure_custom(client: Any, oracle: Oracle, found: dict[str, float]) -> None:
    """Makes a step with a loss of the client's own."""
    tokens = sequences(4, LENGTHS, VOCAB)
    output = client.forward_backward_custom([datum(each, {}) for each in tokens], squares).result()
    total, _ = squares(None, oracle.log_probs(tokens))
    total.backward()
    loss = relative(output.metrics["loss:sum"], float(total.detach()))
    norm = client.optim_step(types.AdamParams(**ADAM)).result().metrics["grad_norm"]
    _note(found, "forward_backward_custom, then optim_step", max(loss, relative(norm, oracle.step(ADAM))))


def measure_rest(client: Any, oracle: Oracle, found: dict[str, float]) -> None:
    """Goes on from a checkpoint: a pass, an answer, and the optimizer's state in one more step."""
    tokens = sequences(6, LENGTHS, VOCAB)
    output = client.forward([datum(each, {}) for each in tokens], "cross_entropy").result()
    _note(found, "forward", apart(log_probs_of(output), oracle.log_probs(tokens)))
    sampler = client.save_weights_and_get_sampling_client().result()
    given = types.ModelInput.from_ints(PROMPT)
    answer = sampler.sample(given, 1, types.SamplingParams(max_tokens=12, seed=5, stop=[])).result().sequences[0]
    text = [*PROMPT, *answer.tokens]
    (exact,) = oracle.log_probs([text])
    _note(found, "sample", apart([answer.logprobs], [exact[len(PROMPT) - 1 :]]))
    likely = sampler.compute_logprobs(types.ModelInput.from_ints(text)).result()
    _note(found, "compute_logprobs", apart([likely[1:]], [exact]))
    inputs = [inputs_of("cross_entropy", each, place) for place, each in enumerate(tokens)]
    client.forward_backward([datum(each, kept) for each, kept in zip(tokens, inputs, strict=True)], "cross_entropy")
    oracle.forward_backward(tokens, "cross_entropy", inputs)
    norm = client.optim_step(types.AdamParams(**ADAM)).result().metrics["grad_norm"]
    deviation = relative(norm, oracle.step(ADAM))
    output = client.forward([datum(each, {}) for each in tokens], "cross_entropy").result()
    _note(
        found,
        "load_state with optimizer, then a step",
        max(deviation, apart(log_probs_of(output), oracle.log_probs(tokens))),
    )


def _note(found: dict[str, float], call: str, deviation: float) -> None:
    found[call] = max(found.get(call, 0.0), deviation)


def main() -> None:
    """Prints the table."""
    pool = Pool()
    columns = {}
    for one in LAYOUTS:
        with TemporaryDirectory() as folder:
            columns[column(one)] = measured(pool, one, Path(folder) / "base")
    print(f"| call | {' | '.join(columns)} |\n{'|---' * (len(columns) + 1)}|")
    for call in next(iter(columns.values())):
        print(f"| {call} | {' | '.join(f'{each[call]:.1e}' for each in columns.values())} |")


if __name__ == "__main__":
    main()
