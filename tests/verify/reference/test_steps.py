"""Whole steps of the reference: terms and gradients from transformers' modules, updates from torch's optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence
from transformers.models.mixtral import modeling_mixtral as mixtral

from mtrain.config import Config
from mtrain.core.batch.sample import Sample
from mtrain.verify.core.samples import HardBatch
from mtrain.verify.reference.model.shapes import shapes_of
from mtrain.verify.reference.model.transformer import Transformer
from mtrain.verify.reference.objective import evaluated
from mtrain.verify.reference.text import rows_of
from tests.config.samples import config
from tests.hf.megatron_names import from_huggingface
from tests.reference import Parameters, doubles, evaluate, exact_steps, random_parameters
from tests.reference import rows_of as samples_rows
from tests.verify.reference.test_against_transformers import Float32IsFloat64

DEPTHS, NUM_EXPERTS, TOP_K, BATCH = 2, 6, 2, 6
SMALL: dict[str, Any] = {
    "model__num_layers": 2,
    "model__hidden_size": 32,
    "model__ffn_hidden_size": 24,
    "model__num_attention_heads": 4,
    "model__num_query_groups": 2,
    "model__vocab_size": 41,
    "train__global_batch_size": BATCH,
    "data__seq_length": 16,
}
SIDES = {
    "z": {"function": "z_loss", "coefficient": 0.1, "aggregation": "token-mean"},
    "entropy": {"function": "entropy", "coefficient": -0.1, "aggregation": "sum"},
    "smooth": {"options": {"label_smoothing": 0.1}, "coefficient": 0.3, "aggregation": "seq-mean-token-sum"},
    "teacher": {
        "function": "distillation",
        "options": {"direction": "reverse", "temperature": 2.0},
        "aggregation": "seq-mean-token-sum-norm",
        "norm_length": 7,
    },
}
EVERYTHING: dict[str, Any] = {
    **SMALL,
    "model__experts": {"num_experts": NUM_EXPERTS, "top_k": TOP_K, "ffn_hidden_size": 24},
    "model__mtp_depths": DEPTHS,
    "data__isolate_documents": True,
    "loss__aggregation": "seq-mean-token-mean",
    "loss__side_terms": SIDES,
    "loss__teacher": {"checkpoint": "runs/teacher"},
    "loss__router": {"z_coefficient": 0.1, "sequence_balance_coefficient": 0.2},
}


class Document(NamedTuple):
    """Results of one document."""

    logits: list[Tensor]
    """Logits of the next token, [length, vocab_size], then of those after it, each one token shorter."""
    routers: list[Tensor]
    """Logits of each router, [length, experts]; those of depths are shorter."""


class Theirs(nn.Module):
    """Mixtral of transformers with further layers of it, which predict further ahead."""

    def __init__(self, user: Config, seed: int) -> None:
        super().__init__()
        model = user.model
        sizes = {"num_attention_heads": model.num_attention_heads, "num_key_value_heads": model.query_groups}
        experts = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K, "experts_implementation": "eager"}
        described = transformers.MixtralConfig(
            num_hidden_layers=model.num_layers + DEPTHS,
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size,
            vocab_size=model.vocab_size,
            rms_norm_eps=model.norm_epsilon,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": model.rope.base},
            attn_implementation="eager",
            **sizes,
            **experts,
        )
        self.whole = transformers.MixtralForCausalLM(described).double()
        norms = nn.ModuleList(mixtral.MixtralRMSNorm(model.hidden_size) for _ in range(3 * DEPTHS))
        self.norms = norms.double()
        linears = [nn.Linear(2 * model.hidden_size, model.hidden_size, bias=False) for _ in range(DEPTHS)]
        self.joins = nn.ModuleList(linears).double()
        for norm in self.modules():
            if isinstance(norm, mixtral.MixtralRMSNorm):
                norm.variance_epsilon = model.norm_epsilon
        torch.manual_seed(seed)
        for name, value in self.named_parameters():
            nn.init.normal_(value, mean=float("norm" in name), std=0.2)
        self._num_layers, self._seen = model.num_layers, list[Tensor]()
        for layer in self.whole.model.layers:
            layer.mlp.gate.register_forward_hook(lambda module, given, found: self._seen.append(found[0]))

    def tensors(self, found: dict[str, Any], user: Config) -> Parameters:
        """Names parameters, or their gradients, as Megatron-Core does."""
        model = user.model.model_copy(update={"num_layers": self._num_layers + DEPTHS, "mtp_depths": 0})
        whole = {name.removeprefix("whole."): value for name, value in found.items() if name.startswith("whole.")}
        renamed = from_huggingface(whole, model)
        for depth in range(DEPTHS):
            ahead = f"mtp.layers.{depth}"
            for name in [each for each in renamed if each.startswith(f"decoder.layers.{self._num_layers + depth}.")]:
                renamed[f"{ahead}.transformer_layer.{name.split('.', 3)[3]}"] = renamed.pop(name)
            for number, norm in enumerate(("enorm", "hnorm", "final_layernorm")):
                renamed[f"{ahead}.{norm}.weight"] = found[f"norms.{3 * depth + number}.weight"].detach()
            renamed[f"{ahead}.eh_proj.weight"] = found[f"joins.{depth}.weight"].detach()
        return renamed

    def forward(self, tokens: Tensor) -> Document:
        """Computes one document by itself, each depth on the positions that have a token so far ahead."""
        self._seen.clear()
        model, embed = self.whole.model, self.whole.model.embed_tokens
        hidden, logits = self._layers(embed(tokens)[None], model.layers[: self._num_layers]), []
        hidden = model.norm(hidden)
        logits.append(self.whole.lm_head(hidden)[0])
        for depth in range(min(DEPTHS, len(tokens) - 1)):
            before_embedding, before, after = self.norms[3 * depth : 3 * depth + 3]
            joined = [before_embedding(embed(tokens[depth + 1 :]))[None], before(hidden[:, :-1])]
            layer = model.layers[self._num_layers + depth]
            hidden = after(self._layers(self.joins[depth](torch.cat(joined, -1)), [layer]))
            logits.append(self.whole.lm_head(hidden)[0])
        return Document(logits, list(self._seen))

    def _layers(self, hidden: Tensor, layers: Any) -> Tensor:
        size = hidden.shape[1]
        angles = self.whole.model.rotary_emb(hidden, torch.arange(size)[None])
        future = torch.full((size, size), -torch.inf, dtype=torch.float64).triu(1)
        for layer in layers:
            hidden = layer(hidden, attention_mask=future[None, None], position_embeddings=angles)
        return hidden


def documents(sample: Sample) -> Iterator[slice]:
    starts = [0] if sample.document_starts is None else sorted(set(sample.document_starts.tolist()))
    yield from map(slice, starts, [*starts[1:], len(sample.tokens)])


class Sums:
    """Means by their names, term by term, of losses that come sequence by sequence."""

    def __init__(self) -> None:
        self.tops: dict[str, list[Tensor]] = {}
        self.bottoms: dict[str, list[float]] = {}

    def add(self, term: str, top: Tensor, bottom: float) -> None:
        """Adds a sequence."""
        self.tops.setdefault(term, []).append(top)
        self.bottoms.setdefault(term, []).append(bottom)

    def mean(self, term: str) -> Tensor:
        """Returns the mean; 0 where there is nothing."""
        top, bottom = torch.stack(self.tops[term]).sum(), sum(self.bottoms[term])
        return top / bottom if bottom else 0.0 * top


def add_sequence(sums: Sums, sample: Sample, model: Theirs, teacher: Theirs) -> None:
    """Adds one sequence to every term."""
    labels, w = torch.from_numpy(sample.labels), torch.from_numpy(sample.mask)
    v, n, is_counted = sample.weight, float(w.sum()), float(bool(w.sum() > 0))
    logits: list[list[Tensor]] = [[] for _ in range(DEPTHS + 1)]
    where: list[list[Tensor]] = [[] for _ in range(DEPTHS + 1)]
    taught, routers = [], [list[Tensor]() for _ in range(2 + DEPTHS)]
    for each in documents(sample):
        found, places = model(torch.from_numpy(sample.tokens[each])), torch.arange(len(labels))[each]
        for depth, of_depth in enumerate(found.logits):
            logits[depth].append(of_depth)
            where[depth].append(places[depth:])
        for router, of_router in zip(routers, found.routers, strict=False):
            router.append(of_router)
        with torch.no_grad():
            taught.append(teacher(torch.from_numpy(sample.tokens[each])).logits[0])
    own, kept = torch.cat(logits[0]), w > 0
    likely = Categorical(logits=own)
    losses = torch.where(kept, -likely.log_prob(torch.where(kept, labels, 0)), 0.0)
    sums.add("main", v * (w * losses).sum() / n if n else 0.0 * own.sum(), v * is_counted)
    sums.add("z", v * (w * own.logsumexp(-1) ** 2).sum(), v * n)
    sums.add("entropy", v * (w * likely.entropy()).sum(), 1.0 / BATCH)
    smooth = nn.functional.cross_entropy(own, torch.where(kept, labels, 0), reduction="none", label_smoothing=0.1)
    sums.add("smooth", v * (w * smooth).sum(), v * is_counted)
    divergence = kl_divergence(Categorical(logits=own / 2), Categorical(logits=torch.cat(taught) / 2))
    sums.add("teacher", v * (w * divergence).sum() / 7, v * is_counted)
    for depth in range(1, DEPTHS + 1):
        at = torch.cat(where[depth]) if where[depth] else torch.zeros(0, dtype=torch.int64)
        ahead = torch.cat(logits[depth]) if where[depth] else own[:0]
        of_depth = nn.functional.cross_entropy(ahead, torch.where(kept, labels, 0)[at], reduction="none")
        count = float(w[at].sum())
        total = (w[at] * of_depth).sum() / count if count else 0.0 * own.sum()
        sums.add(f"mtp_{depth}", v * total, v * float(count > 0))
    seen = [torch.cat(router) for router in routers if router]
    sums.add("router_z", torch.stack([(each.logsumexp(-1) ** 2).sum() for each in seen]).sum(), float(len(labels)))
    balances = [mixtral.load_balancing_loss_func((each,), NUM_EXPERTS, TOP_K) / TOP_K for each in seen]
    sums.add("router_sequence_balance", torch.stack(balances).sum(), 1.0)


@pytest.mark.parametrize("number", [0, *(pytest.param(each, marks=pytest.mark.nightly) for each in (1, 2))])
def test_every_term_and_gradient_is_that_of_the_modules_of_transformers(number: int) -> None:
    """Has batches of all hard kinds: documents, padding, fractional weights, sequences without loss tokens."""
    user = config(**EVERYTHING)
    batch, sums = HardBatch(user, number), Sums()
    with Float32IsFloat64():
        model, teacher = Theirs(user, seed=1), Theirs(user, seed=2)
        given, known = (each.tensors(dict(each.named_parameters()), user) for each in (model, teacher))
        for sample in batch.samples():
            add_sequence(sums, sample, model, teacher)
        factors = {"main": 1.0, "router_z": 0.1, "router_sequence_balance": 0.2}
        factors |= {name: side.coefficient for name, side in user.loss.side_terms.items()}
        factors |= {f"mtp_{depth}": user.loss.mtp_coefficient / DEPTHS for depth in range(1, DEPTHS + 1)}
        means = {name: sums.mean(name) for name in sums.tops}
        objective = torch.stack([factors[name] * mean for name, mean in means.items()]).sum()
        objective.backward()

    assert {name: tuple(value.shape) for name, value in given.items()} == shapes_of(user.model)
    rows = rows_of(batch.texts(), user.data.seq_length, user.model.vocab_size, torch.device("cpu"))
    of_samples = samples_rows(batch.samples())
    for field in ("tokens", "labels", "weights", "documents", "positions", "sample_weights"):
        assert torch.equal(getattr(of_samples, field), getattr(rows, field)), field
    found = evaluated(user, given, rows, Transformer(user.model, known), lambda *given: pytest.fail("no user's term"))
    assert {name: float(term.mean.detach()) for name, term in found.terms.items()} == pytest.approx(
        {name: mean.item() for name, mean in means.items()}, rel=1e-11, abs=1e-13
    )
    bottoms = {name: sum(each) for name, each in sums.bottoms.items()}
    assert {name: term.denominator for name, term in found.terms.items()} == pytest.approx(bottoms, rel=1e-14)
    assert found.objective == pytest.approx(objective.item(), rel=1e-11)
    exact = model.tensors({name: value.grad for name, value in model.named_parameters()}, user)
    assert found.gradients.keys() == exact.keys()
    for name, gradient in exact.items():
        largest = float(gradient.abs().max())
        assert float((found.gradients[name] - gradient).abs().max()) <= 1e-9 * largest + 1e-14, name
    assert found.grad_norm == pytest.approx(nn.utils.get_total_norm(list(exact.values())).item(), rel=1e-12)


PLAIN = config(
    **SMALL,
    model__qkv_bias=True,
    model__tied_embeddings=True,
    loss__aggregation="seq-mean-token-mean",
    loss__side_terms={"z": {"function": "z_loss", "coefficient": 0.1}},
)


def sample(rng: np.random.Generator, size: int, weight: float = 1.0, share: float = 0.6) -> Sample:
    ids = rng.integers(0, PLAIN.model.vocab_size, size + 1)
    return Sample(ids[:-1], ids[1:], (rng.random(size) < share).astype(np.float64), weight)


def ragged(seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [sample(rng, size, 1.0 + slot) for slot, size in enumerate((5, 9, 3, 9))]


@pytest.mark.parametrize("clip_grad", [0.0, 0.05, 1e6])
def test_updates_are_those_of_torch_from_step_to_step(clip_grad: float) -> None:
    constants = {"weight_decay": 0.3, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-6, "clip_grad": clip_grad}
    user = PLAIN.model_copy(update={"optimizer": PLAIN.optimizer.model_copy(update=constants)})
    parameters, rates, batches = random_parameters(user.model, seed=1), [0.01, 0.02, 0.005], [*map(ragged, (4, 5, 6))]
    results = exact_steps(user, parameters, rates, batches)
    leaves = {name: nn.Parameter(value) for name, value in doubles(parameters).items()}
    plain = [value for value in leaves.values() if value.ndim == 1]
    matrices = [value for value in leaves.values() if value.ndim == 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6)
    for lr, batch, result in zip(rates, batches, results, strict=True):
        for group in theirs.param_groups:
            group["lr"] = lr
        for name, gradient in evaluate(user, leaves, batch).gradients.items():
            leaves[name].grad = gradient
        norm = nn.utils.clip_grad_norm_(leaves.values(), clip_grad or torch.inf).item()
        theirs.step()
        assert result.grad_norm == pytest.approx(norm, rel=1e-12)
        expected = {name: value.detach() for name, value in leaves.items()}
        torch.testing.assert_close(result.parameters, expected, rtol=1e-9, atol=1e-12)


def test_a_batch_without_loss_tokens_changes_nothing() -> None:
    parameters = random_parameters(PLAIN.model, seed=1)
    empty = [replace(each, mask=np.zeros_like(each.mask)) for each in ragged(7)]
    with_empty = exact_steps(PLAIN, parameters, [0.1, 0.2, 0.3], [ragged(4), empty, ragged(5)])
    without = exact_steps(PLAIN, parameters, [0.1, 0.3], [ragged(4), ragged(5)])
    assert (with_empty[1].loss, with_empty[1].grad_norm, with_empty[1].denominators["main"]) == (0.0, 0.0, 0.0)
    assert with_empty[1].parameters is with_empty[0].parameters
    torch.testing.assert_close(with_empty[2].parameters, without[1].parameters, rtol=0, atol=0)


def test_gradients_are_finite_differences_of_the_objective() -> None:
    parameters, batch, rng = random_parameters(PLAIN.model, seed=1), ragged(2), np.random.default_rng(3)
    direction = {name: torch.from_numpy(rng.normal(size=value.shape)) for name, value in parameters.items()}
    gradients = evaluate(PLAIN, parameters, batch).gradients
    slope = sum((gradients[name] * direction[name]).sum().item() for name in parameters)

    def moved(step: float) -> float:
        elsewhere = {name: value + step * direction[name] for name, value in parameters.items()}
        return evaluate(PLAIN, elsewhere, batch).objective

    assert slope == pytest.approx((moved(1e-5) - moved(-1e-5)) / 2e-5, rel=1e-6)
