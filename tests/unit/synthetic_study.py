"""A study that was never run: payloads of evaluate, select and rollout jobs with invented answers.

It has the shape of the tiny preset (three tasks, three protocols, two styles) and effects of known sign: a
larger scale learns and forgets more, a base donor learns a little less, OPSD forgets more than a graft does.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import zlib
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace

import numpy

from grafting.config.claims import Claim, load_claims
from grafting.evaluation.budget import affordable, trained
from grafting.evaluation.frontier import dominating
from grafting.plan.code import PROJECT
from grafting.plan.frontiers import sizes
from grafting.provenance.store import Store

SKILLS = [f"skill{i:02d}" for i in range(19)]
TASKS = ["wug", "zup", "dax"]
ITEMS = {"val": {"prior": 10, "new": 30}, "test": {"prior": 20, "new": 50}}
PRIOR = {"wug": 0.91, "zup": 0.79, "dax": 0.86, "all": 0.62}
NEW = {"wug": 0.97, "zup": 0.9, "dax": 0.96, "all": 0.72}


STAGES = {
    "evaluations": "evaluate",
    "tests": "evaluate",
    "selections": "select",
    "rollouts": "rollout",
    "models": "merge",
    "frontiers": "evaluate",
    "deltas": "merge",
}
CLAIMS = [claim.model_dump(mode="json") for claim in load_claims(PROJECT / "claims.yaml")]
OTHERS = "# Source: invented\ntask,method,new_task,prior_mean\nscience,sft,60,50\nscience,opsd,70,60\n"


class FakeJob:
    """The part of RunningJob that the report reads."""

    def __init__(self, spec: dict, inputs: dict[str, list[Path]], root: Path, results: Path) -> None:
        self.spec, self._inputs, self.results, self.metrics = spec, inputs, results, {}
        self.store = Store(root)
        ids = {role: [f"{p.parent.name}/{p.name}" for p in paths] for role, paths in inputs.items()}
        self.job = SimpleNamespace(inputs=ids)

    def inputs(self, role: str) -> list[Path]:
        return self._inputs.get(role, [])

    addresses = inputs

    def sidecar(self, stage: str, key: str) -> dict:
        assert stage == "train"
        return self.store.read(f"train/{key}")


def train_record(root: Path, key: str) -> None:
    """Sentinel and payload of an invented training job."""
    opsd = ".opsd." in key
    cost = {
        "tokens_generated": 30_000 if opsd else 0,
        "tokens_forwarded": 120_000 if opsd else 0,
        "tokens_backpropagated": 61_440,
        "flops": 6 * 2_000_000 * 80 * 64 * 12 * (2 if opsd else 1),
        "cpu_seconds": 15.5 if opsd else 8.25,
        "wall_seconds": 15.9 if opsd else 8.5,
        "peak_memory_bytes": 700_000_000,
        "phases": {},
    }
    write_record(root, f"train/{key}", {"seed": int(key.rpartition(".s")[2].partition("-")[0])}, {}, cost)
    folder = root / "store" / "train" / key
    folder.mkdir(parents=True)
    more = {"rollout_length": 4.0, "rollout_accuracy": 0.5} if opsd else {}
    rows = [{"step": i, "loss": math.exp(-i / 4), **more} for i in range(1, 11)]
    (folder / "training.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_record(root: Path, job_id: str, spec: dict, inputs: dict, cost: dict | None = None) -> None:
    """A sentinel as the runner writes it, as far as the report reads it."""
    stage, _, name = job_id.partition("/")
    path = root / "provenance" / stage / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "id": job_id, "stage": stage, "name": name.rpartition("-")[0], "key": name.rpartition("-")[2], "spec": spec,
        "inputs": inputs, "code": "c0de", "cost": cost or {"cpu_seconds": 1.0, "flops": 0},
        "payload": {"file.json": {"sha256": "ab" * 32, "bytes": 10}}, "versions": {"numpy": "1"},
        "git": {"revision": "f" * 40, "dirty": False}, "host": {"cpu": "invented"},
    }  # fmt: skip
    path.write_text(json.dumps(record))


class StudyBuilder:
    """Writes payloads under `root` and collects the report's spec; `job()` gives the finished report job."""

    def __init__(self, root: Path, seeds=(0, 1, 2), model_seeds=(0,)) -> None:
        self.root, self.seeds, self.model_seeds = root, list(seeds), list(model_seeds)
        self.store = Store(root)
        self.inputs = {role: [] for role in STAGES}
        self.evaluations, self.selections, self.rollouts, self.frontiers = [], [], [], []
        self.deltas: list[dict] = []
        self.claims, self._recorded = CLAIMS, set()
        self._families: dict[tuple, dict[str, list[dict]]] = {}

    def job(self, protocols=("single", "sequential", "parallel"), results: Path | None = None) -> FakeJob:
        for cell in list(self._families):
            self._frontier(*cell)
        spec = {
            "preset": "synthetic",
            "seeds": self.seeds,
            "model_seeds": self.model_seeds,
            "tasks": TASKS,
            "styles": ["own", "expert"],
            "protocols": list(protocols),
            "settings": {
                "preset": "synthetic",
                "seeds": self.seeds,
                "learners": {"opsd": {"divergence": "forward_kl", "teacher": "frozen"}},
            },
            "evaluations": self.evaluations,
            "selections": self.selections,
            "rollouts": self.rollouts,
            "frontiers": self.frontiers,
            "deltas": self.deltas,
            "notes": ["An invented study."],
            "claims": self.claims,
            "reference": {"others.csv": OTHERS},
        }
        return FakeJob(spec, self.inputs, self.root, results or self.root / "results")

    def folder(self, role: str) -> tuple[int, Path]:
        path = self.root / "store" / STAGES[role] / f"{role}.{len(self.inputs[role]):04d}-abc"
        path.mkdir(parents=True)
        write_record(self.root, f"{path.parent.name}/{path.name}", {"split": role}, {})
        self.inputs[role].append(path)
        return len(self.inputs[role]) - 1, path

    def trained(self, candidates: list[dict]) -> None:
        """Records of the training jobs behind candidates, each once."""
        keys = {k for c in candidates for stages in c["trained"].values() for jobs in stages for k in jobs}
        for key in sorted(keys - self._recorded):
            train_record(self.root, key)
        self._recorded |= keys

    def deployed(self, model_seed: int) -> None:
        for split in ("val", "test"):
            index, folder = self.folder("evaluations")
            labels = {"protocol": "none", "family": "deployed", "method": "deployed", "task": "all"}
            write_point(folder, "reference", split, dict.fromkeys(TASKS, 0.01), 0.97, {}, f"d{model_seed}")
            self.evaluations.append(
                {"input": index, "point": "reference", "split": split, "trained": [],
                 "labels": {**labels, "model_seed": model_seed, "mask": "none"}}
            )  # fmt: skip

    def family(self, name: str, protocol: str, style: str, task: str, model_seed: int, candidates: list[dict]) -> None:
        """Test of the candidate with the best expected score, which a selection would choose."""
        self.trained(candidates)
        self._families.setdefault((protocol, style, task, model_seed), {})[name] = candidates
        best = max(candidates, key=lambda c: sum(expected(c, protocol, style, task)))
        _, folder = self.folder("selections")
        listed = self._shown(candidates, protocol, style, task)
        choice = {"choice": candidate_name(best), "label": best, "score": 0.9, "candidates": listed}
        (folder / "choice.json").write_text(json.dumps(choice))
        test, folder = self.folder("tests")
        (folder / "protocol.json").write_text("{}")
        for seed in self.seeds:
            for stage in range(3) if protocol == "sequential" else [None]:
                values = accuracies(best, protocol, style, task, seed, stage, model_seed)
                salt = f"{candidate_name(best)}{protocol}{style}{task}{seed}{stage}{model_seed}"
                key = f"{zlib.crc32(salt.encode()):08x}"
                write_point(folder, key, "test", *values, {"seed": seed, "stage": stage}, salt)
        self.selections.append(
            {"family": name, "protocol": protocol, "style": style, "task": task, "model_seed": model_seed,
             "selection": len(self.inputs["selections"]) - 1, "test": test, "models": {}}
        )  # fmt: skip

    @staticmethod
    def _shown(candidates: list[dict], protocol: str, style: str, task: str) -> list[dict]:
        """As a selection lists them."""
        listed = []
        for c in candidates:
            new, prior = expected(c, protocol, style, task)
            score = (new + prior) / 2
            listed.append({"name": candidate_name(c), "label": c, "new": new, "prior": prior, "score": score})
        return listed

    def _frontier(self, protocol: str, style: str, task: str, model_seed: int) -> None:
        """The test of what the claims' frontiers need, once all families are there."""
        families = self._families.pop((protocol, style, task, model_seed))
        keep = sizes(
            [Claim.model_validate(claim) for claim in self.claims],
            [SimpleNamespace(name=n, candidates=c, protocol=protocol, style=style) for n, c in families.items()],
        )
        if not keep:
            return
        index, folder = self.folder("frontiers")
        found, entries = [], {}
        for kept in keep:
            candidates = self._shown(families[kept["method"]], protocol, style, task)
            if "measure" in kept:
                sides = [self._shown(families[kept[side]], protocol, style, task) for side in ("method", "against")]
                cost = lambda keys: sum(self.store.read(f"train/{key}")["cost"]["flops"] for key in keys)  # noqa: E731
                candidates = affordable(candidates, min(cost(trained(side)) for side in sides), cost)
            found.append(
                {"method": kept["method"], "measure": kept.get("measure"), "against": kept.get("against"),
                 "points": dominating(candidates, kept["size"])}
            )  # fmt: skip
            named = {candidate["name"]: candidate["label"] for candidate in candidates}
            for chosen in found[-1]["points"]:
                if chosen in entries:
                    continue
                entries[chosen] = []
                for seed in self.seeds:
                    stage = 2 if protocol == "sequential" else None
                    values = accuracies(named[chosen], protocol, style, task, seed, stage, model_seed)
                    salt = f"{chosen}{protocol}{style}{task}{seed}{stage}{model_seed}"
                    key = f"{zlib.crc32(salt.encode()):08x}"
                    write_point(folder, key, "test", *values, {"seed": seed, "stage": stage}, salt)
                    behind = named[chosen]["trained"][str(seed)][-1]
                    entries[chosen].append({"seed": seed, "point": key, "trained": behind})
        (folder / "frontier.json").write_text(json.dumps(found))
        self.frontiers.append(
            {"input": index, "protocol": protocol, "style": style, "task": task, "model_seed": model_seed,
             "candidates": entries}
        )  # fmt: skip

    def validation(self, candidate: dict, protocol: str, style: str, task: str, model_seed: int) -> None:
        self.trained([candidate])
        for seed in self.seeds:
            index, folder = self.folder("evaluations")
            stage = 2 if protocol == "sequential" else None
            values = accuracies(candidate, protocol, style, task, seed, stage, model_seed)
            salt = f"v{candidate_name(candidate)}{protocol}{style}{task}{seed}{model_seed}"
            write_point(folder, "p", "val", *values, {}, salt)
            labels = {
                "protocol": protocol,
                "family": None,
                "seed": seed,
                "model_seed": model_seed,
                "stage": stage,
            }
            self.evaluations.append(
                {"input": index, "point": "p", "split": "val", "labels": {**labels, **candidate},
                 "trained": candidate["trained"][str(seed)][-1]}
            )  # fmt: skip

    def updates(self, learners: list[tuple[str, str]], model_seed: int) -> None:
        """Norms that grow with the layer, cosines that fall with the donor's distance."""
        for seed in self.seeds:
            index, folder = self.folder("deltas")
            lines = ["layer,task,method,donor,lr,other,quantity,value"]
            for layer in ("0", "1", "2", "model.embed_tokens.weight", "all"):
                depth = 0.01 * (1 + int(layer)) if layer.isdigit() else 0.02
                for task in TASKS:
                    for place, (method, donor) in enumerate(learners):
                        own = f"{layer},{task},{method},{donor},0.0003"
                        for quantity in ("norm", "relative_norm", "donor_distance"):
                            lines.append(f"{own},,{quantity},{depth * (1 + 0.1 * seed) if quantity != 'norm' else 3}")
                        pairs = [(task, *other) for other in learners[:place]]
                        pairs += [(other, method, donor) for other in TASKS[: TASKS.index(task)]]
                        for pair in pairs:
                            lines.append(f"{own},{' '.join(pair)} 0.0003,cosine,{0.9 - 0.2 * place}")
                            lines.append(f"{own},{' '.join(pair)} 0.0003,sign_agreement,{0.8 - 0.05 * place}")
            (folder / "deltas.csv").write_text("\n".join(lines) + "\n")
            self.deltas.append({"input": index, "seed": seed, "model_seed": model_seed})

    def rollout(self, task: str, style: str, shown: bool, model_seed: int) -> None:
        index, folder = self.folder("rollouts")
        (folder / "summary.json").write_text(json.dumps({"accuracy": 0.99 if shown else 0.02, "n": 60}))
        self.rollouts.append({"input": index, "task": task, "style": style, "with_demonstration": shown,
                              "model_seed": model_seed})  # fmt: skip


def candidate(
    method: str, donor: str, scale: float, task: str, style: str, seeds, mask="none", operator="graft",
    staged=False,
) -> dict:  # fmt: skip
    """`trained` as the plan gives it: seed -> stages -> keys; `staged` for a candidate of the sequence."""
    learned = [task] if task != "all" else TASKS
    keys = {str(s): [f"{t}.{style}.{method}.{donor}.s{s}-0" for t in learned] for s in seeds}
    trained = {s: [ks[: i + 1] for i in range(len(ks))] if staged else [ks] for s, ks in keys.items()}
    return {
        "method": method,
        "style": style,
        "task": task,
        "donor": donor,
        "scale": scale,
        "mask": mask,
        "lr": 3e-4,
        "operator": operator,
        "trained": trained,
    }


def candidate_name(c: dict) -> str:
    return f"{c['method']}-{c['donor']}.{c['operator']}.l{c['scale']:g}.{c['mask']}"


def expected(c: dict, protocol: str, style: str, task: str) -> tuple[float, float]:
    """(new, prior) that the invented candidate has on average."""
    loss = {"deployed": 0, "last": 0, "base": 0.35, "p80": 0.6, "p60": 1.5}[c["donor"]]
    new = 1 / (1 + math.exp(-(math.log(NEW[task] / (1 - NEW[task])) + 5 * (c["scale"] - 1) - loss)))
    forget = (0.97 - PRIOR[task]) * (1.15 if c["method"] == "opsd" else 1) * (1.3 if style == "expert" else 1)
    prior = 0.97 - forget * min(c["scale"], 1.4) ** 2.2
    if "-fisher-" in c["mask"]:
        prior, new = prior + 0.3 * (0.97 - prior), new - 0.02
    return new, min(prior, 0.97)


def accuracies(c, protocol, style, task, seed, stage, model_seed) -> tuple[dict[str, float], float]:
    new, prior = expected(c, protocol, style, task)
    wobble = random.Random(f"{c['method']}{c['donor']}{task}{style}{seed}{model_seed}")
    new = min(max(new + wobble.gauss(0, 0.015), 0), 1)
    prior = min(max(prior + wobble.gauss(0, 0.015), 0), 1)
    if task != "all":
        return {task: new}, prior
    if stage is None:
        return dict.fromkeys(TASKS, new), prior
    seen = {t: min(1.0, new + 0.25 * (i - stage + 0.6)) if i <= stage else 0.02 for i, t in enumerate(TASKS)}
    return seen, min(0.97, prior + 0.1 * (2 - stage))


def write_point(
    folder: Path, key: str, split: str, new: dict[str, float], prior: float, labels: dict, salt: str
) -> None:
    """One evaluated point whose items have a difficulty of their own, the same for every point."""
    noise, lines, scores = numpy.random.default_rng(zlib.crc32(salt.encode())), [], []
    for suite, task, accuracy in [
        *(("prior", s, prior) for s in SKILLS),
        *(("new", t, a) for t, a in new.items()),
    ]:
        n = ITEMS[split][suite]
        difficulty = numpy.random.default_rng(zlib.crc32(f"{split}{task}".encode())).normal(size=n)
        answers = 0.7 * difficulty + 0.714 * noise.normal(size=n) < NormalDist().inv_cdf(
            min(max(accuracy, 1e-9), 1 - 1e-9)
        )
        lines += [
            {"id": f"{split}{task}{i}", "task": task, "text": "x", "correct": bool(correct),
             "reason": "correct" if correct else "wrong", "finish": "stop"}
            for i, correct in enumerate(answers)
        ]  # fmt: skip
        kind = "recall" if task == "wug" else "skill"
        scores.append({"suite": suite, "task": task, "kind": kind, "split": split, "n": n,
                       "correct": int(answers.sum()), "reasons": {}, "finish": {"stop": n}})  # fmt: skip
    content = {"name": key, "key": key, "recipe": None, "labels": labels, "scores": scores}
    (folder / f"{key}.json").write_text(json.dumps(content))
    with gzip.open(folder / f"{key}.jsonl.gz", "wt", compresslevel=1) as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def tiny_study(
    root: Path, seeds=(0, 1, 2), model_seeds=(0,), donors=("deployed", "base", "p80", "p60")
) -> StudyBuilder:
    """The tiny preset's protocols, families and sweeps."""
    b = StudyBuilder(root, seeds, model_seeds)
    for m in b.model_seeds:
        b.deployed(m)
        b.updates([*(("sft", donor) for donor in donors), ("opsd", "deployed")], m)
        for task in TASKS:
            b.rollout(task, "own", False, m)
            for style in ("own", "expert"):
                b.rollout(task, style, True, m)
                _single(b, task, style, m, donors if style == "own" else donors[:2])
        _many(b, "sequential", m, "chain", "last", [0.7, 1.0], ("regraft", (0.5, 0.7), ("sum",)))
        _many(
            b,
            "parallel",
            m,
            "sum",
            "deployed",
            [0.5, 0.7, 0.9, 1.0],
            ("scaled", (0.5, 0.7, 0.9), ("sum", "ties-0.3")),
        )
    return b


def _single(b: StudyBuilder, task: str, style: str, m: int, donors) -> None:
    def make(method, donor, scale, mask="none"):
        return candidate(method, donor, scale, task, style, b.seeds, mask)

    grafts = [make("sft", donor, scale) for donor in donors for scale in (0.6, 0.8, 1.0)]
    if style == "own":
        masks = ("kfac-fisher-0.01", "kfac-random-0.01")
        grafts += [make("sft", d, s, k) for d in donors[:2] for s in (1.0, 1.3) for k in masks]
    opsd = [make("opsd", "deployed", scale) for scale in (0.6, 0.8, 1.0)]
    for c in [*grafts, *opsd]:
        b.validation(c, "single", style, task, m)
    families = {
        "sft": [c for c in grafts if c["donor"] == "deployed" and c["scale"] == 1 and c["mask"] == "none"],
        "opsd": opsd[-1:],
        "graft": [c for c in grafts if "-random-" not in c["mask"]],
        "graft_early": [c for c in grafts if c["donor"] != "deployed" and c["mask"] == "none"],
        "sft_scaled": [c for c in grafts if c["donor"] == "deployed" and c["mask"] == "none"],
        "opsd_scaled": opsd,
        "graft_unmasked": [c for c in grafts if c["mask"] == "none"],
        "graft_masked": [c for c in grafts if "-fisher-" in c["mask"]],
        "graft_random": [c for c in grafts if "-random-" in c["mask"]],
        "graft_unscaled": [c for c in grafts if c["mask"] == "none" and c["scale"] == 1],
    }
    for name, candidates in families.items():
        if candidates:
            b.family(name, "single", style, task, m, candidates)


def _many(b: StudyBuilder, protocol, m, operator, donor, scales, more) -> None:
    suffix, sums, operators = more
    staged = protocol == "sequential"
    sft, opsd = (
        [candidate(method, donor, s, "all", "own", b.seeds, operator=operator, staged=staged) for s in scales]
        for method in ("sft", "opsd")
    )
    merged = [
        candidate("sft", d, s, "all", "own", b.seeds, operator=o, staged=staged)
        for d in ("deployed", "base")
        for s in sums
        for o in operators
        if (d, s, o) != (donor, s, operator)
    ]
    for c in [*sft, *opsd, *merged]:
        b.validation(c, protocol, "own", "all", m)
    for name, candidates in (
        ("sft", sft[-1:]), ("opsd", opsd[-1:]), (f"opsd_{suffix}", opsd), ("graft", [*sft[:-1], *merged]),
    ):  # fmt: skip
        b.family(name, protocol, "own", "all", m, candidates)
