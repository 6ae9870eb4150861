"""The own forward and backward pass of Llama-like models against transformers', which it stands in for."""

import pytest
import torch
from test_training import (  # noqa: F401  (fixtures)
    OPSD,
    Job,
    data,
    fresh_accelerate,
    objective_for,
    start,
    tokenizer,
)
from transformers import LlamaConfig, LlamaForCausalLM

from grafting.models import lean, load_model
from grafting.models.attention import register
from grafting.models.forward import completion_logits, continued_logits
from grafting.rollouts import generate
from grafting.rollouts.counting import Counter
from grafting.training import loop
from grafting.training.batches import Item, collate
from grafting.training.divergences import by_rows, divergence

VOCABULARY = 5000


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def llama(request):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=request.param,
        attn_implementation=register(),
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


@pytest.fixture
def plain(monkeypatch):
    """A context in which transformers' own path is taken."""

    class Plain:
        def __enter__(self):
            monkeypatch.setattr(lean, "applies", lambda model: False)

        def __exit__(self, *error):
            monkeypatch.undo()

    return Plain()


def prompts_of(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def result(model, logits) -> tuple[torch.Tensor, dict]:
    """Logits, and the gradients of a scalar that weighs them unevenly."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    (torch.log_softmax(logits, -1) * weights).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(one, other):
    torch.testing.assert_close(one[0], other[0], rtol=1e-5, atol=2e-5)
    for name, gradient in one[1].items():
        assert (gradient - other[1][name]).norm() <= 1e-5 * gradient.norm(), name


def test_logits_and_gradients_are_those_of_transformers(llama, plain):
    ids = torch.tensor(prompts_of([20] * 4))
    wanted = torch.zeros(4, 20, dtype=torch.bool)
    wanted[:, 11:17] = True
    wanted[1, 19] = True
    assert lean.applies(llama)
    own = result(llama, completion_logits(llama, ids, wanted))
    with plain:
        assert_equal(result(llama, completion_logits(llama, ids, wanted)), own)


@pytest.mark.parametrize("lengths", [(9, 14, 14, 3, 11), (8, 8, 8)], ids=["padded", "equal"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_gives_the_tokens_of_transformers(llama, plain, lengths, temperature):
    """Rows end at different steps and leave the batch."""
    options = {
        "max_new_tokens": 20,
        "stop_ids": set(range(400)),
        "pad_id": 0,
        "temperature": temperature,
        "seeds": list(range(len(lengths))),
        "batch_size": 8,
        "detail": True,
    }
    own = generate(llama, prompts_of(lengths), **options)
    with plain:
        theirs = generate(llama, prompts_of(lengths), **options)
    assert [r.tokens for r in own] == [r.tokens for r in theirs]
    assert temperature == 0 or len({len(r.tokens) for r in own}) > 1
    for one, other in zip(own, theirs, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("lengths", [(9, 14, 14, 3, 11), (8, 8, 8)], ids=["padded", "equal"])
def test_the_prompts_pass_serves_the_loss_too(llama, plain, lengths):
    prompts, kept = prompts_of(lengths), []
    rollouts = generate(
        llama,
        prompts,
        max_new_tokens=12,
        stop_ids=set(range(400)),
        pad_id=0,
        temperature=1.0,
        seeds=list(range(len(prompts))),
        batch_size=len(prompts),
        kept=kept,
    )
    completions = [rollout.tokens for rollout in rollouts]
    own = result(llama, continued_logits(llama, kept[0], completions))
    ids, predicts, _ = collate([Item("", p, c, c) for p, c in zip(prompts, completions, strict=True)], 0)
    with plain:
        assert_equal(result(llama, completion_logits(llama, ids, predicts)), own)


def test_completions_of_one_token_need_the_prompts_alone(llama):
    prompts, kept = prompts_of([4, 7]), []
    generate(llama, prompts, max_new_tokens=1, stop_ids=set(), pad_id=0, batch_size=2, kept=kept)
    ids, predicts, _ = collate([Item("", p, [9], [9]) for p in prompts], 0)
    found = continued_logits(llama, kept[0], [[9], [9]])
    torch.testing.assert_close(found, completion_logits(llama, ids, predicts), rtol=1e-5, atol=2e-5)


def test_prompts_are_kept_of_a_whole_batch_only(llama):
    kept = []
    generate(llama, prompts_of([4, 7]), max_new_tokens=1, stop_ids=set(), pad_id=0, batch_size=1, kept=kept)
    assert kept == []


def test_where_it_does_not_apply(llama, start):
    assert not lean.applies(load_model(start)), "models made inside the pipeline stay where they were"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not lean.applies(llama)
    handle = llama.model.layers[1].mlp.register_forward_hook(lambda *a: None)
    assert not lean.applies(llama)
    handle.remove()
    assert lean.applies(llama)
    inner = llama.model.layers[0].self_attn.q_proj

    class Adapted(torch.nn.Linear):
        """As an adapter's: more than a product."""

    inner.__class__ = Adapted
    assert not lean.applies(llama)
    inner.__class__ = torch.nn.Linear
    assert lean.applies(llama)
    llama.gradient_checkpointing_enable({"use_reentrant": False})
    assert not lean.applies(llama)
    llama.gradient_checkpointing_disable()
    assert not lean.applies(llama.to(torch.bfloat16))


@pytest.mark.parametrize("options", [{}, {"top_k": 50}, {"top_k": 50, "support": "teacher", "tail": False}])
@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_a_divergence_by_rows(name, options):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(70, 300, generator=generator) for _ in range(2))
    weights = torch.rand(70, generator=generator)

    def both(function):
        logits = student.clone().requires_grad_()
        values = function(logits)
        (values * weights).sum().backward()
        return values.detach(), logits.grad

    whole = both(lambda s: divergence(name, teacher, s, **options))
    parts = both(lambda s: by_rows(lambda s, t: divergence(name, t, s, **options), s, teacher))
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"purify": 0.5}, {"importance_clip": 2.0, "skip_tokens": 1}])
def test_self_distillation_takes_the_same_steps(options, start, data, tokenizer, monkeypatch):
    """Four steps on a small model, with the threshold lowered below its vocabulary; fewer tokens are forwarded."""
    spec = OPSD | {"steps": 4, "opsd": OPSD["opsd"] | {"teacher": "ema", "ema_rate": 0.1} | options}

    def run(small: int) -> tuple[list[dict], dict, dict]:
        monkeypatch.setattr(lean, "SMALL", small)
        model, job = load_model(start), Job(None, spec)
        objective = objective_for(job, model, tokenizer, data)
        counter = Counter()
        objective.loss(model, objective.prepare(0, objective.examples[:4], counter), counter).backward()
        model.zero_grad()
        records = loop.train(
            model, objective.batches(4, 0), objective, loop.Settings.from_spec(spec), job, label="opsd"
        )
        return records, {n: p.detach() for n, p in model.named_parameters()}, vars(counter)

    theirs, own = run(10**6), run(0)
    for one, other in zip(theirs[0], own[0], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)
        assert one["rollout_length"] == other["rollout_length"]
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3, abs=1e-6)
    for name, tensor in theirs[1].items():
        torch.testing.assert_close(own[1][name], tensor, rtol=1e-3, atol=1e-4)
    assert own[2]["tokens_forwarded"] < theirs[2]["tokens_forwarded"]
    assert own[2]["tokens_backpropagated"] == theirs[2]["tokens_backpropagated"]
