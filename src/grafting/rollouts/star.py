"""Self-improvement data: what a model says itself and a verifier accepts, as a data folder that any learner reads.

STaR (arXiv 2203.14465): k samples per training prompt, kept if the verifier accepts them; for prompts without any,
*rationalisation*: k samples again with the reference answer in the prompt, kept under the prompt without it.
With `with_demonstration` the answer is shown from the start: the accepted traces of a privileged teacher.

spec: kind "star", samples (k), keep (accepted responses per prompt, distinct, in the order of their samples),
rationalise, with_demonstration, name (of the style that the kept responses become), temperature, max_new_tokens,
seed, batch_size, threads. inputs: model, data.
payload: a data folder (info.json and the splits; train holds the kept pairs, val and test the reference answers in
the new style, which only a guard looks at), rollouts.jsonl.gz (every sample, with how it was asked and whether it was
kept), summary.json (acceptance rates).
"""

from __future__ import annotations

import json
from pathlib import Path

from grafting.errors import UserError
from grafting.models import count_parameters, load_model, load_tokenizer
from grafting.provenance.files import write_json
from grafting.rollouts.counting import Counter
from grafting.rollouts.runtime import device
from grafting.rollouts.scoring import Response, respond
from grafting.rollouts.stage import write_responses
from grafting.tasks import load_examples, load_info
from grafting.tasks.scorers import FAILED


def run(job) -> None:
    """Sample, verify, keep. UserError if the verifier fails, or accepts nothing at all."""
    spec, folder = job.spec, job.input("data")
    info, examples = load_info(folder), load_examples(folder, "train")
    model, tokenizer = load_model(job.input("model")).to(device()), load_tokenizer(job.input("model"))
    counter, asked, rows = Counter(), [], []

    def ask(chosen: list[dict], shown: bool, first: int) -> dict[str, list[Response]]:
        """Accepted responses per example id, and all of them noted."""
        # the answer itself is what is shown, under a style of its own
        answered = [{**e, "demonstrations": {"answer": e["answer"]}} for e in chosen]
        accepted: dict[str, list[Response]] = {}
        for sample in range(spec["samples"]):
            with job.phase("rollout"):
                responses = respond(
                    model,
                    tokenizer,
                    info,
                    answered,
                    max_new_tokens=spec["max_new_tokens"],
                    batch_size=spec["batch_size"],
                    style="answer" if shown else None,
                    temperature=spec["temperature"],
                    seed=spec["seed"],
                    step=first + sample,
                    counter=counter,
                    finished=job.saving.part(f"{'shown' if shown else 'plain'} {first + sample}"),
                )
            for response in responses:
                if response.reason == FAILED:  # not a rejection: nothing is known of the response
                    raise UserError(
                        f"{job.id}: the scorer {info['scorer']!r} failed on sample {first + sample} of example "
                        f"{response.id}, its own message stands above in the log; mend the scorer and run again"
                    )
                kept = accepted.setdefault(response.id, [])
                # a truncated response would teach never to stop
                fine = response.correct and response.finish == "stop" and bool(response.text.strip())
                new = fine and len(kept) < spec["keep"] and response.text not in [r.text for r in kept]
                kept += [response] if new else []
                asked.append(response)
                rows.append({"shown": shown, "sample": first + sample, "accepted": fine, "kept": new})
        return {name: found for name, found in accepted.items() if found}

    with job.saving.section():
        kept = ask(examples, spec["with_demonstration"], 0)
        alone, rationalised = len(kept), {}
        rest = [example for example in examples if example["id"] not in kept]
        if rest and spec["rationalise"]:
            rationalised = ask(rest, True, spec["samples"])
    rates = _rates(rows, len(examples), alone, len(rationalised))
    write_json(job.out / "summary.json", rates)
    write_responses(job.out / "rollouts.jsonl.gz", asked, rows)
    kept |= rationalised
    if not kept:
        raise UserError(
            f"{job.id}: the verifier accepts none of {len(asked)} responses to {len(examples)} prompts of "
            f"{info['name']}; raise samples, switch rationalise on, or take demonstrations from elsewhere"
        )
    _write(job.out, folder, info, examples, kept, spec["name"])
    job.metrics.update({key: value for key, value in rates.items() if isinstance(value, int | float)})
    job.add_cost(**counter.cost(count_parameters(model)))


def _rates(rows: list[dict], prompts: int, alone: int, rationalised: int) -> dict:
    """Share of samples accepted, by how they were asked; prompts with a kept response, by where it came from."""
    rates: dict[str, float] = {"prompts": prompts, "kept_prompts": alone + rationalised, "rationalised": rationalised}
    for name, shown in (("acceptance_plain", False), ("acceptance_shown", True)):
        found = [row["accepted"] for row in rows if row["shown"] is shown]
        if found:
            rates[name] = sum(found) / len(found)
    return rates


def _write(
    out: Path, folder: Path, info: dict, examples: list[dict], kept: dict[str, list[Response]], style: str
) -> None:
    lines = []
    for example in examples:
        for k, response in enumerate(kept.get(example["id"], [])):
            name = example["id"] if k == 0 else f"{example['id']}.{k + 1}"
            shown = {**example["demonstrations"], style: response.text}
            lines.append({**example, "id": name, "demonstrations": shown})
    splits = {"train": lines}
    for split in ("val", "test"):
        if (folder / f"{split}.jsonl").is_file():
            splits[split] = [
                {**e, "demonstrations": {**e["demonstrations"], style: e["answer"]}}
                for e in load_examples(folder, split)
            ]
    for split, found in splits.items():
        text = "".join(json.dumps(example, ensure_ascii=False) + "\n" for example in found)
        (out / f"{split}.jsonl").write_text(text, encoding="utf-8")
    counts = {**info.get("counts", {}), **{split: len(found) for split, found in splits.items()}}
    notes = [*info.get("notes", []), f"style {style}: the model's own responses that the verifier accepts"]
    styles = list(dict.fromkeys([*info.get("styles", []), style]))
    write_json(out / "info.json", {**info, "styles": styles, "counts": counts, "notes": notes})
