"""Fisher estimates against enumeration and dense algebra, and the masks made from them."""

import contextlib
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from grafting.errors import UserError
from grafting.models import load_model, save_model
from grafting.models.scratch import new_model, new_tokenizer
from grafting.sensitivity import likelihood, stage, streaming
from grafting.sensitivity.diagonal import diagonal_fisher
from grafting.sensitivity.kfac import eigenbases, kfac_factors, linear_layers
from grafting.sensitivity.likelihood import Sequence, encode, sample_labels
from grafting.sensitivity.masks import Mask, apply_mask, mask_report
from grafting.sensitivity.selection import cuts, kth_largest
from grafting.sensitivity.upcasting import load_narrow, upcast_in_use
from grafting.tasks.stage import run as build_data
from grafting.tasks.tiny_language import VOCABULARY as VOCABULARY_TINY

VOCABULARY = 5
SEQUENCES = [Sequence("one", [1, 2, 3], [4, 2]), Sequence("two", [2], [1, 1, 0]), Sequence("three", [3, 3], [4])]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Two threads on tensors this small cost six times the time of one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            attention_bias=True,
        )
    ).eval()
    for parameter in model.parameters():  # away from the near-zero start, where all is uniform
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def log_probabilities(model, sequence):
    """[C, V], by the plain forward pass."""
    logits = model(input_ids=torch.tensor([sequence.prompt + sequence.completion])).logits[0]
    first = len(sequence.prompt) - 1
    return torch.log_softmax(logits[first : first + len(sequence.completion)], dim=-1)


def exact_fisher(model, sequence):
    """sum_t sum_v pi(v) (d log pi(v) / d theta)^2 over all labels, per parameter."""
    logs = log_probabilities(model, sequence)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for t, v in itertools.product(range(len(sequence.completion)), range(VOCABULARY)):
        gradients = torch.autograd.grad(logs[t, v], list(model.parameters()), retain_graph=True)
        for values, gradient in zip(total.values(), gradients):
            values += logs[t, v].exp().detach() * gradient**2
    return total


# ---- the diagonal ----


def test_true_fisher_is_exact_in_expectation(model, monkeypatch):
    """Weighted over every label sequence the model could draw, the estimate is the exact Fisher."""
    sequence = SEQUENCES[0]
    logs = log_probabilities(model, sequence).detach()
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for labels in itertools.product(range(VOCABULARY), repeat=len(sequence.completion)):
        monkeypatch.setattr(likelihood, "sample_labels", lambda *_, labels=labels: torch.tensor(labels))
        probability = sum(logs[t, v] for t, v in enumerate(labels)).exp()
        for name, values in diagonal_fisher(model, [sequence], fisher="true").items():
            total[name] += probability * values
    for name, values in exact_fisher(model, sequence).items():
        torch.testing.assert_close(total[name], values, rtol=1e-4, atol=1e-6)


def test_sampled_fisher_comes_near_the_exact_one(model):
    exact = exact_fisher(model, SEQUENCES[0])
    repeated = [Sequence(str(i), SEQUENCES[0].prompt, SEQUENCES[0].completion) for i in range(300)]
    sampled = diagonal_fisher(model, repeated, fisher="true", seed=1)
    ratio = sum(v.sum() for v in sampled.values()) / sum(v.sum() for v in exact.values())
    assert 0.8 < ratio < 1.25


def test_empirical_fisher_is_the_mean_squared_gradient(model):
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for s in SEQUENCES:
        logs = log_probabilities(model, s)
        chosen = logs[torch.arange(len(s.completion)), torch.tensor(s.completion)].sum()
        for values, gradient in zip(expected.values(), torch.autograd.grad(chosen, list(model.parameters()))):
            values += gradient**2 / len(SEQUENCES)
    result = diagonal_fisher(model, SEQUENCES, fisher="empirical")
    assert result.keys() == expected.keys() and "lm_head.weight" not in result
    for name, values in expected.items():
        torch.testing.assert_close(result[name], values, rtol=1e-4, atol=1e-7)


def test_labels_follow_the_model_and_not_the_batch():
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]])
    many = [Sequence(str(i), [1], [0]) for i in range(4000)]
    drawn = sample_labels(logits.expand(4000, 4), many, seed=3)
    frequencies = torch.bincount(drawn, minlength=4) / 4000
    torch.testing.assert_close(frequencies, torch.softmax(logits[0], -1), atol=0.03, rtol=0)
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    together = sample_labels(rows, SEQUENCES, seed=3)
    alone = [sample_labels(rows[a:b], [s], seed=3) for s, (a, b) in zip(SEQUENCES, [(0, 2), (2, 5), (5, 6)])]
    assert together.tolist() == torch.cat(alone).tolist()
    assert drawn.tolist() != sample_labels(logits.expand(4000, 4), many, seed=4).tolist()


def test_broken_model_is_refused(model):
    broken = LlamaForCausalLM(model.config)
    broken.model.norm.weight.data[0] = float("nan")
    with pytest.raises(UserError, match="example one"):
        diagonal_fisher(broken, SEQUENCES, fisher="empirical")
    with pytest.raises(UserError, match="not finite"):
        kfac_factors(broken, SEQUENCES, fisher="empirical")


def test_encode_refuses(monkeypatch):
    example = {"id": "abc", "messages": [], "demonstrations": {"own": "y"}}
    monkeypatch.setattr(likelihood, "encode_example", lambda *_: ([], [1]))
    with pytest.raises(UserError, match="abc has an empty prompt"):
        encode(None, [example], "own")
    with pytest.raises(UserError, match="abc has no response in style 'expert'"):
        encode(None, [example], "expert")
    with pytest.raises(UserError, match="retention_items"):
        encode(None, [], "own")


# ---- K-FAC ----


@pytest.fixture(scope="module")
def dense_factors(model):
    """A and G written out: one example at a time, gradients of kept outputs, empirical labels."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    inputs, outputs = {n: [] for n in layers}, {n: [] for n in layers}
    seen = {}

    def keep(name):
        def hook(_, arguments, output):
            output.retain_grad()
            seen[name] = (arguments[0], output)

        return hook

    handles = [m.register_forward_hook(keep(n)) for n, m in layers.items()]
    for s in SEQUENCES:
        ids = torch.tensor([s.prompt + s.completion[:-1]])
        logs = torch.log_softmax(model(input_ids=ids).logits[0, len(s.prompt) - 1 :], dim=-1)
        logs[torch.arange(len(s.completion)), torch.tensor(s.completion)].sum().backward()
        for n, (a, o) in seen.items():
            inputs[n].append(a[0].detach().double())
            outputs[n].append(o.grad[0].double())
    for handle in handles:
        handle.remove()
    model.zero_grad()
    second = {n: [torch.cat(x[n]) for x in (inputs, outputs)] for n in layers}
    return {n: tuple(x.T @ x / len(x) for x in pair) for n, pair in second.items()}


def test_factors_match_dense_ones(model, dense_factors):
    assert list(linear_layers(model)) == list(dense_factors) and len(dense_factors) == 14
    for batch_size in (1, 2, 16):  # padding must not count
        factors = kfac_factors(model, SEQUENCES, fisher="empirical", batch_size=batch_size)
        for name, pair in dense_factors.items():
            for got, expected in zip(factors[name], pair):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-8)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_eigenbases_rebuild_the_factors(dense_factors):
    tensors = eigenbases(dense_factors)
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    for module, (a, g) in dense_factors.items():
        for letter, factor in (("A", a), ("G", g)):
            values = tensors[f"{module}.{letter}.values"].double()
            vectors = tensors[f"{module}.{letter}.vectors"].double()
            assert (values.diff() <= 0).all() and (values >= 0).all()
            torch.testing.assert_close(
                vectors @ values.diag() @ vectors.T, factor, rtol=1e-5, atol=1e-6 * float(factor.abs().max())
            )


def test_true_factors_are_seeded(model):
    first, again, other = (kfac_factors(model, SEQUENCES, seed=seed) for seed in (0, 0, 1))
    name = next(iter(first))
    assert all(torch.equal(first[n][1], again[n][1]) for n in first)
    assert not torch.equal(first[name][1], other[name][1])


# ---- ranking ----


@given(
    values=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    chunk=st.integers(1, 20),
    held=st.sampled_from([8, 1000]),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_cuts_are_exact_and_break_ties_by_index(values, chunk, held, data):
    """Whatever the chunks, and whether the scores are held at once or bracketed by a sample."""
    scores = np.array(values, dtype=np.float64)
    counts = data.draw(st.lists(st.integers(0, len(values)), min_size=1, max_size=3))

    def scan(step):
        return ((start, scores[start : start + chunk : step]) for start in range(0, len(scores), chunk))

    for count, cut in zip(counts, cuts(scan, len(scores), counts, held)):
        marked = np.concatenate(
            [cut.marks(start, scores[start : start + chunk]) for start in range(0, len(scores), chunk)]
        )
        order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
        assert np.flatnonzero(marked).tolist() == sorted(order)


# ---- masks ----


@pytest.fixture(scope="module")
def update(model):
    generator = torch.Generator().manual_seed(5)
    return {n: torch.randn(p.shape, generator=generator).double() for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def payloads(model, dense_factors, tmp_path_factory):
    root = tmp_path_factory.mktemp("sensitivity")
    save_file(diagonal_fisher(model, SEQUENCES, fisher="empirical"), root / "diagonal.safetensors")
    save_file(eigenbases(dense_factors), root / "kfac.safetensors")
    return {"diagonal": root, "kfac": root}


def flat(tensors):
    return torch.cat([tensors[name].reshape(-1) for name in sorted(tensors)])


@pytest.mark.parametrize("rank", ["fisher", "fisher_delta2"])
@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.3, 0.95])
def test_diagonal_mask(update, payloads, rank, fraction):
    masked = apply_mask(update, {"estimator": "diagonal", "rank": rank, "fraction": fraction}, payloads)
    scores = flat(load_file(payloads["diagonal"] / "diagonal.safetensors")).double()
    if rank == "fisher_delta2":
        scores = scores * flat(update) ** 2
    gone = flat(masked) == 0
    count = round(fraction * len(scores))
    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))[:count]
    assert torch.nonzero(gone)[:, 0].tolist() == sorted(order)
    assert torch.equal(flat(masked)[~gone], flat(update)[~gone])


@pytest.mark.parametrize("rank", ["fisher", "fisher_delta2"])
@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.3])
def test_kfac_mask_against_a_dense_decomposition(update, payloads, dense_factors, rank, fraction):
    """U_G (M * U_G^T dW U_A) U_A^T with numpy's own eigenvectors of the dense factors."""
    masked = apply_mask(update, {"estimator": "kfac", "rank": rank, "fraction": fraction}, payloads)
    bases = {m: [np.linalg.eigh(f.numpy()) for f in pair] for m, pair in dense_factors.items()}
    rotated = {m: g[1].T @ update[f"{m}.weight"].numpy() @ a[1] for m, (a, g) in bases.items()}
    scores = {m: np.outer(g[0].clip(0), a[0].clip(0)) for m, (a, g) in bases.items()}
    if rank == "fisher_delta2":
        scores = {m: s * rotated[m] ** 2 for m, s in scores.items()}
    every = np.sort(np.concatenate([s.reshape(-1) for s in scores.values()]))[::-1]
    threshold = every[round(fraction * len(every)) - 1]
    for m, (a, g) in bases.items():
        expected = g[1] @ np.where(scores[m] >= threshold, 0, rotated[m]) @ a[1].T
        np.testing.assert_allclose(masked[f"{m}.weight"].numpy(), expected, atol=1e-5)
    others = [n for n in update if n.removesuffix(".weight") not in bases]
    assert "model.embed_tokens.weight" in others and "model.layers.0.self_attn.q_proj.bias" in others
    assert all(masked[n] is update[n] for n in others)


def test_kfac_mask_of_everything_but_a_little_leaves_little(update, payloads):
    masked = apply_mask(update, {"estimator": "kfac", "rank": "fisher_delta2", "fraction": 0.999}, payloads)
    report = mask_report(update, masked)
    assert report["tensors"]["model.layers.0.mlp.up_proj.weight"] > 0.9
    assert report["tensors"]["model.norm.weight"] == 0


@pytest.mark.parametrize(
    "estimator, rank",
    [("diagonal", "fisher"), ("kfac", "fisher"), ("kfac", "fisher_delta2"), ("diagonal", "random"), ("kfac", "random")],
)
def test_no_mask_and_whole_mask(update, payloads, estimator, rank):
    mask = {"estimator": estimator, "rank": rank}
    assert apply_mask(update, mask | {"fraction": 0}, payloads) is update
    assert not flat(apply_mask(update, mask | {"fraction": 1}, payloads)).any()
    narrow = apply_mask({n: u.float() for n, u in update.items()}, mask | {"fraction": 0.1}, payloads)
    assert {u.dtype for u in narrow.values()} == {torch.float32}


@given(fraction=st.floats(0.001, 0.999), seed=st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_random_coordinates(update, fraction, seed):
    mask = {"estimator": "diagonal", "rank": "random", "fraction": fraction, "seed": seed}
    masked = apply_mask(update, mask, {})  # needs no sensitivity
    gone = flat(masked) == 0
    assert int(gone.sum()) == round(fraction * len(gone))
    assert torch.equal(flat(masked)[~gone], flat(update)[~gone])
    backwards = apply_mask(dict(reversed(update.items())), mask, {})
    assert all(torch.equal(backwards[name], masked[name]) for name in update)
    if 0.1 < fraction < 0.9:
        one, two = (masked[f"model.layers.{i}.mlp.up_proj.weight"] == 0 for i in (0, 1))
        assert not torch.equal(one, two)
        assert not torch.equal(gone, flat(apply_mask(update, mask | {"seed": 9}, {})) == 0)


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.3, 0.95])
def test_random_directions_of_the_kfac_basis(update, payloads, fraction):
    """As many as the Fisher mask removes, in the same basis, over the whole model, others untouched."""
    bases = load_file(payloads["kfac"] / "kfac.safetensors")
    modules = sorted(name.removesuffix(".A.values") for name in bases if name.endswith(".A.values"))

    def gone(**options):
        mask = {"estimator": "kfac", "rank": "random", "fraction": fraction, "seed": 0} | options
        masked = apply_mask(update, mask, payloads)
        for name in update:
            assert name.removesuffix(".weight") in modules or masked[name] is update[name]
        parts = {}
        for m in modules:
            g, a = (bases[f"{m}.{letter}.vectors"].double() for letter in "GA")
            before, after = (g.T @ u[f"{m}.weight"] @ a for u in (update, masked))
            parts[m] = after.abs() < 1e-4 * before.abs()
            torch.testing.assert_close(after[~parts[m]], before[~parts[m]], rtol=1e-3, atol=1e-5)
        return torch.cat([parts[m].reshape(-1) for m in modules])

    drawn = gone()
    assert int(drawn.sum()) == int(gone(rank="fisher").sum()) == round(fraction * len(drawn))
    assert torch.equal(drawn, gone()) and not torch.equal(drawn, gone(seed=1))
    assert not torch.equal(drawn, gone(rank="fisher"))


def test_mask_report():
    update = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}
    report = mask_report(update, {"a": torch.tensor([3.0, 0.0]), "b": torch.zeros(2)})
    assert report == {"removed": 16 / 25, "norm": 5.0, "tensors": {"a": 16 / 25, "b": 0.0}}


def test_masks_refuse_another_models_sensitivity(update, payloads, tmp_path):
    def mask(estimator, **kw):
        return {"estimator": estimator, "rank": "fisher", "fraction": 0.1} | kw

    bigger = update | {"model.layers.0.mlp.up_proj.weight": torch.ones(13, 8)}
    for estimator in ("diagonal", "kfac"):
        with pytest.raises(UserError, match="another model"):
            apply_mask(bigger, mask(estimator), payloads)
    with pytest.raises(UserError, match="has no tensor extra"):
        apply_mask(update | {"extra": torch.ones(1)}, mask("diagonal"), payloads)
    with pytest.raises(UserError, match="no tensor model.layers.0.mlp.down_proj.weight"):
        apply_mask({"model.norm.weight": torch.ones(8)}, mask("kfac"), payloads)
    with pytest.raises(UserError, match="needs the input sensitivity_kfac"):
        apply_mask(update, mask("kfac"), {"diagonal": tmp_path})
    with pytest.raises(UserError, match="needs the input sensitivity_kfac"):
        apply_mask(update, mask("kfac", rank="random"), {})
    with pytest.raises(UserError, match="no kfac.safetensors"):
        apply_mask(update, mask("kfac"), {"kfac": tmp_path})
    wrongs = mask("kfac", fraction=1.5), mask("random", rank="random"), mask("ekfac"), mask("kfac", per="x")
    for wrong in wrongs:
        with pytest.raises(UserError, match="recipe.mask"):
            apply_mask(update, wrong, payloads)


# ---- the stage ----


@pytest.mark.parametrize("distinct", [None, 1, 2, 5, 3000])
@pytest.mark.parametrize("size", [1, 4096, 4097, 60_000])
def test_kth_largest_is_a_sorts(size, distinct):
    rng = np.random.default_rng(size)
    scores = rng.random(size) if distinct is None else rng.integers(0, distinct, size) / distinct
    for k in {1, 2, size // 3, size - 1, size} - {0}:
        if k <= size:
            assert kth_largest(scores, k) == np.sort(scores)[size - k]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A tiny-language model and its prior suite, as the stages before this one leave them."""
    root = tmp_path_factory.mktemp("inputs")
    architecture = {"layers": 1, "width": 16, "feed_forward": 16, "heads": 2, "context": 64, "embedding_std": 0.06}
    save_model(
        new_model(architecture, VOCABULARY_TINY, seed=0), new_tokenizer(VOCABULARY_TINY, "deployed"), root / "model"
    )
    (root / "prior").mkdir()
    spec = {"builder": "tiny.prior", "val_items": 1, "test_items": 1, "retention_items": 2, "seed": 1}
    build_data(SimpleNamespace(spec=spec, out=root / "prior", id="data/prior", places={}))
    return {"model": root / "model", "prior": root / "prior"}


@pytest.mark.parametrize("estimator", ["diagonal", "kfac"])
def test_stage_writes_the_same_bytes_twice(inputs, tmp_path, estimator):
    outs = []
    for name in ("one", "two"):
        out = tmp_path / name
        out.mkdir()
        costs = {}
        job = SimpleNamespace(
            spec={"estimator": estimator, "fisher": "true", "seed": 0, "threads": 1},
            out=out,
            input=inputs.get,
            metrics={},
            add_cost=costs.update,
            phase=lambda _: contextlib.nullcontext(),
            progress=lambda *a, **k: SimpleNamespace(update=lambda *a: None, close=lambda: None),
        )
        stage.run(job)
        outs.append({p.name: p.read_bytes() for p in out.iterdir()})
    assert outs[0] == outs[1] and set(outs[0]) == {f"{estimator}.safetensors", "report.json"}
    report = json.loads(outs[0]["report.json"])
    assert report["examples"] == job.metrics["examples"] == 2 * 19
    assert report["tokens"] == costs["tokens_forwarded"] > report["completion_tokens"] >= 3 * 38
    weights = load_file(inputs["model"] / "model.safetensors")
    update = {name: torch.ones_like(tensor) for name, tensor in weights.items()}
    mask = {"estimator": estimator, "rank": "fisher_delta2", "fraction": 0.01}
    assert mask_report(update, apply_mask(update, mask, {estimator: tmp_path / "one"}))["removed"] > 0


@pytest.mark.parametrize("estimator", ["diagonal", "kfac"])
def test_groups_of_layers_give_the_same_bytes(model, tmp_path, estimator):
    """Streamed a layer at a time, and as the safetensors library writes what is estimated at once."""
    traces = {}
    for name, budget in (("whole", streaming.BUDGET), ("parts", 1)):
        traces[name] = streaming.write_estimate(
            model, SEQUENCES, estimator, tmp_path / name, fisher="true", seed=3, budget=budget
        )
        assert streaming.passes(model, estimator, budget) == (1 if name == "whole" else len(traces[name]))
    if estimator == "diagonal":
        tensors = diagonal_fisher(model, SEQUENCES, fisher="true", seed=3)
    else:
        tensors = eigenbases(kfac_factors(model, SEQUENCES, fisher="true", seed=3))
    save_file(tensors, tmp_path / "library", metadata={"format": "pt"})
    assert traces["whole"] == traces["parts"]
    library = (tmp_path / "library").read_bytes()
    assert (tmp_path / "whole").read_bytes() == library == (tmp_path / "parts").read_bytes()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_kept_in_16_bits_give_what_they_give_in_float32(tmp_path, tied, dtype, bias):
    """The same likelihoods and estimates as of the model loaded in float32, layers together and one at a time."""
    torch.manual_seed(1)
    small = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
                    num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied, attention_bias=bias)
    ).to(dtype).eval()  # fmt: skip
    for parameter in small.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    small.save_pretrained(tmp_path / "model")
    narrow, wide = load_narrow(tmp_path / "model"), load_model(tmp_path / "model", "float32")
    kept = {name for name, p in narrow.named_parameters() if p.dtype == dtype}
    linear = {f"{name}.weight" for name in linear_layers(wide)}
    assert kept == linear | (set() if tied else {"model.embed_tokens.weight"})
    assert upcast_in_use(wide) is wide
    for estimator in ("diagonal", "kfac"):
        found = {}
        for name, model, budget in (("wide", wide, 1 << 30), ("narrow", narrow, 1 << 30), ("parts", narrow, 1)):
            streaming.write_estimate(
                model, SEQUENCES, estimator, tmp_path / f"{estimator}.{name}", fisher="true", seed=3, budget=budget
            )
            found[name] = load_file(tmp_path / f"{estimator}.{name}")
        assert {name: p.dtype for name, p in narrow.named_parameters() if p.dtype == dtype}.keys() == kept
        for name, expected in found["wide"].items():
            if estimator == "kfac" and name.endswith("vectors"):  # their signs are free
                a, b = (
                    (f[name] * f[name.replace("vectors", "values")]) @ f[name].T
                    for f in (found["narrow"], found["wide"])
                )
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))
                continue
            torch.testing.assert_close(found["narrow"][name], expected, rtol=1e-4, atol=1e-6 * float(expected.max()))
        for name, expected in found["narrow"].items():
            assert torch.equal(found["parts"][name], expected)


@pytest.mark.parametrize(
    "estimator, rank", list(itertools.product(["diagonal", "kfac"], ["fisher", "fisher_delta2", "random"]))
)
def test_fraction_per_tensor(update, payloads, estimator, rank):
    mask = {"estimator": estimator, "rank": rank, "fraction": 0.25, "per": "tensor"}
    masked = apply_mask(update, mask, payloads)
    for name, delta in update.items():
        if estimator == "diagonal":
            assert int((masked[name] == 0).sum()) == round(0.25 * delta.numel())
        elif name.endswith("_proj.weight"):
            bases = load_file(payloads["kfac"] / "kfac.safetensors")
            g, a = (bases[f"{name[:-7]}.{letter}.vectors"].double() for letter in "GA")
            rotated = (g.T @ masked[name] @ a).abs()
            assert int((rotated < 1e-5 * delta.abs().max()).sum()) == round(0.25 * delta.numel())


@pytest.mark.parametrize("estimator", ["diagonal", "kfac"])
def test_report_estimates_the_loss(model, update, payloads, dense_factors, estimator):
    """1/2 d^T F d, and what is left of it, against dense Kronecker products and plain sums."""
    mask = Mask.model_validate({"estimator": estimator, "rank": "fisher_delta2", "fraction": 0.02})
    masked = apply_mask(update, mask, payloads)
    report = mask_report(update, masked, mask, payloads)
    losses = []
    for deltas in (update, masked):
        if estimator == "diagonal":
            fisher = load_file(payloads["diagonal"] / "diagonal.safetensors")
            losses.append(sum(float((fisher[n].double() * d**2).sum()) / 2 for n, d in deltas.items()))
        else:
            losses.append(
                sum(
                    float(deltas[f"{m}.weight"].T.reshape(-1) @ torch.kron(a, g) @ deltas[f"{m}.weight"].T.reshape(-1))
                    for m, (a, g) in dense_factors.items()
                )
                / 2
            )
    assert report["loss"]["whole"] == pytest.approx(losses[0], rel=1e-4)
    assert report["loss"]["removed"] == pytest.approx(1 - losses[1] / losses[0], rel=1e-3)
    # ranked by what each direction costs, a small mask removes more of the loss than of the norm
    assert report["loss"]["removed"] > 2 * report["removed"] > 0


def test_quadratic_estimate_is_the_curvature_of_the_loss(model):
    """F of the model's own labels is the Hessian of KL(theta_0 || theta): 1/2 d^T F d against finite differences."""
    sequence = SEQUENCES[1]
    generator = torch.Generator().manual_seed(0)
    exact = exact_fisher(model, sequence)
    name = "model.layers.1.mlp.down_proj.weight"
    parameter = dict(model.named_parameters())[name]
    before = log_probabilities(model, sequence).detach().double()
    for _ in range(3):
        row, column = (int(torch.randint(0, n, (1,), generator=generator)) for n in parameter.shape)
        step, kl = 0.05, 0.0
        for sign in (1, -1):  # third orders cancel
            with torch.no_grad():
                parameter[row, column] += sign * step
                after = log_probabilities(model, sequence).double()
                parameter[row, column] -= sign * step
            kl += float((before.exp() * (before - after)).sum()) / 2
        expected = float(exact[name][row, column]) * step**2 / 2
        assert kl == pytest.approx(expected, rel=0.05, abs=1e-7)
