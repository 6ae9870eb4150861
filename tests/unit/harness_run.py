"""What test_harness.py runs in a process of its own, without a network: the bridge, and the harness's own class."""

import json
import socket
import sys
from pathlib import Path
from types import SimpleNamespace


def refuse(*arguments, **settings):
    raise AssertionError("something asked for the network")


socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse


def main(folder: Path) -> dict:
    import torch
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    from grafting.evaluation import harness
    from grafting.models import load_model, load_tokenizer
    from grafting.tasks import load_info, stage
    from grafting.tasks.harness_suites import suite_of

    archive = folder / "mmlu" / "mmlu.zip"
    files = [{"name": archive.name, "sha256": json.loads(sys.argv[2]), "bytes": archive.stat().st_size}]
    spec = {"builder": "harness", "val_items": 24, "test_items": 24, "retention_items": 4, "seed": 1, "suite": "local"}
    out = folder / "data"
    out.mkdir()
    stage.run(
        SimpleNamespace(spec={**spec, "tasks": suite_of("local", {}), "files": files}, out=out, id="d", places={})
    )
    suite = harness.load_suite(out, load_info(out), "test", {"batch_size": 5, "max_new_tokens": 4}, folder / "tasks")
    model, tokenizer = load_model(folder / "model"), load_tokenizer(folder / "model")
    rows = suite.predict(model, tokenizer)
    scores = suite.summarise(rows)

    def likelihoods(lm) -> list:
        found = evaluate(lm, suite.loaded["mmlu_local"], bootstrap_iters=0, apply_chat_template=True, log_samples=True)
        samples = sorted(found["samples"]["mmlu_local"], key=lambda sample: sample["doc_id"])
        return [[[*pair], float(a[0][0])] for s in samples for pair, a in zip(s["arguments"], s["resps"], strict=True)]

    theirs = likelihoods(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=5))
    ours = likelihoods(harness.live_model(model, tokenizer, 5, 4))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(-1)
    again = [row["text"] for row in suite.predict(model, tokenizer)]
    return {"rows": rows, "scores": scores, "theirs": theirs, "ours": ours, "again": again}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
