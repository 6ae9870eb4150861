"""Keys change exactly when what they name changes."""

from collections import Counter
from pathlib import Path

import pytest
import yaml

from grafting.config import resolve
from grafting.errors import UserError
from grafting.plan import code
from grafting.plan.aliases import Alias, Aliases, check_aliases, read_aliases, with_entry, write_aliases
from grafting.plan.jobs import Job, key_of
from grafting.plan.planfile import read_job, write_plan
from grafting.plan.study import Study
from grafting.provenance.files import digest, write_json
from grafting.provenance.store import Store

PROJECT = Path(__file__).resolve().parents[2]
DEFAULT = yaml.safe_load((PROJECT / "config.yaml").read_text())


def study(**overlay) -> Study:
    return Study(resolve(DEFAULT, overlay))


def new_jobs(before: Study, after: Study) -> Counter:
    return Counter(after.jobs[i].stage for i in set(after.jobs) - set(before.jobs))


@pytest.fixture(scope="module")
def default() -> Study:
    return study()


def test_plan_is_repeatable(default):
    assert list(study().jobs) == list(default.jobs)


def test_order_of_keys_changes_nothing(default):
    scrambled = {key: DEFAULT[key] for key in reversed(list(DEFAULT))}
    assert set(Study(resolve(scrambled)).jobs) == set(default.jobs)


def test_every_input_is_an_earlier_job(default):
    seen = set()
    for job in default.jobs.values():
        assert set(job.needs()) <= seen, job.id
        seen.add(job.id)


def test_one_seed_trains_nothing_new(default):
    new = new_jobs(default, study(seeds=[0]))
    assert set(new) == {"select", "evaluate", "merge", "report"}
    evaluated = [i for i in set(study(seeds=[0]).jobs) - set(default.jobs) if i.startswith("evaluate/")]
    assert {i.partition(".")[0] for i in evaluated} == {"evaluate/test", "evaluate/frontier"}


def test_opsd_learning_rate_moves_opsd_only(default):
    changed = study(learners={"opsd": {"lrs": [1e-4]}})
    fresh = set(changed.jobs) - set(default.jobs)
    assert fresh
    assert all(".opsd." in i for i in fresh if i.startswith("train/"))
    assert not any(i.startswith(("data/", "models/", "rollout/", "sensitivity/")) for i in fresh)


def test_a_control_adds_its_own_jobs_only(default):
    more = study(learners={"dft": {"lrs": [1e-4, 2e-4]}})
    lost = set(default.jobs) - set(more.jobs) - {default.report}
    assert {i.partition(".")[0] for i in lost} == {"merge/deltas"}  # the updates of all learners in one table
    fresh = [more.jobs[i] for i in set(more.jobs) - set(default.jobs) if i.startswith("train/")]
    assert len(fresh) == 2 * 3 * 3  # learning rates, seeds, tasks; the first style only
    assert all(job.spec["objective"] == "dft" and "dft" not in job.spec for job in fresh)
    assert [f["family"] for f in more.selections if f["family"] == "dft"] == ["dft"] * 3
    assert {job.entry[1] for job in fresh} == {"grafting.training.objectives.weighted"}


def test_controls_get_the_inputs_they_need():
    rolling = {"lrs": [1e-4], "temperature": 1.0, "max_new_tokens": 9}
    s = study(learners={"replay": {**rolling, "share": 0.5}, "dft": {"lrs": [1e-4]}}, tasks=["zup"], seeds=[0])
    roles = {job.spec["objective"]: set(job.inputs) for job in s.jobs.values() if job.stage == "train"}
    assert roles["replay"] == {"model", "data", "teacher", "prior"}
    assert roles["dft"] == roles["sft"] == {"model", "data"} and roles["opsd"] == {"model", "data", "teacher"}


def test_rounds_alternate_rollouts_and_training():
    name = "opsd_rounds"
    learners = {name: {"objective": "opsd", "rounds": 4, "rollouts_per_prompt": 5}}
    s = study(learners=learners, tasks=["zup"], seeds=[0])
    jobs = [job for job in s.jobs.values() if f".{name}." in job.name and job.stage in ("rollout", "train")]
    assert [job.stage for job in jobs] == ["rollout", "train"] * 4
    for rolled, trained in zip(jobs[::2], jobs[1::2]):
        assert trained.inputs["rollouts"] == [rolled.id] and trained.inputs["model"] == rolled.inputs["model"]
        assert trained.spec["steps"] == 20 and "rounds" not in trained.spec["opsd"]
    assert jobs[2].inputs["model"] == [jobs[1].id] and jobs[0].inputs["model"] == [s.models["deployed"]]
    assert [job.spec["first_sample"] for job in jobs[::2]] == [0, 5, 10, 15]
    (selection,) = [job for job in s.jobs.values() if job.stage == "select" and f".{name}." in job.name]
    (candidate,) = selection.spec["candidates"]
    # the cost of the candidate is that of all rounds with their rollouts
    assert candidate["label"]["trained"]["0"] == [[job.key for job in jobs]]
    with pytest.raises(UserError, match="steps 80 is no multiple of rounds 3"):
        study(learners={name: {"objective": "opsd", "rounds": 3}})


def test_models_make_their_own_demonstrations():
    way = {"samples": 2, "temperature": 1.0, "max_new_tokens": 9}
    teacher = {
        "objective": "grpo",
        "lrs": [1e-4],
        "samples": 4,
        "temperature": 1.0,
        "max_new_tokens": 9,
        "privileged": True,
    }
    s = study(
        tasks=["zup"],
        seeds=[0],
        styles=["own", "star", "pedagogical"],
        learners={
            "teacher": teacher,
            "gated_sft": {"lrs": [1e-4], "threshold": 4, "width": 1, "styles": ["pedagogical"]},
        },
        self_improvement={
            "star": {**way, "method": "star", "rounds": 2, "lr": 1e-4},
            "pedagogical": {**way, "method": "pedagogical", "teacher": "teacher"},
        },
    )
    made = {job.id: job for job in s.jobs.values() if job.spec.get("kind") == "star"}
    first, second, traces = made.values()
    (between,) = [s.jobs[ref] for ref in second.inputs["model"]]
    assert between.inputs == {"model": [s.models["deployed"]], "data": [first.id]} and between.spec["style"] == "star"
    assert first.inputs["model"] == [s.models["deployed"]] and traces.spec["with_demonstration"] is True
    (rl,) = [s.jobs[ref] for ref in traces.inputs["model"]]
    assert rl.spec["grpo"]["privileged"] is True
    # sft, opsd and the grafts' donors all learn from the last round; the teacher is no row of its own
    learned = [job for job in s.jobs.values() if job.stage == "train" and job.inputs["data"] == [second.id]]
    assert {job.spec["objective"] for job in learned} == {"sft", "opsd"}
    assert {key for job in learned for key in job.inputs["model"]} >= {s.models["deployed"], s.models["base"]}
    assert "teacher" not in {f["family"] for f in s.selections}
    gated = [f for f in s.selections if f["family"] == "gated_sft"]
    assert [f["style"] for f in gated] == ["pedagogical"]
    (selection,) = [job for job in s.jobs.values() if job.id == gated[0]["selection"]]
    assert len(selection.spec["candidates"][0]["label"]["trained"]["0"][0]) == 3  # teacher, traces, the learner


def test_another_model_writes_demonstrations_once_for_all_seeds():
    way = {"samples": 4, "temperature": 1.0, "max_new_tokens": 9}
    writer = {"hub": "lab/writer", "revision": "a" * 40}
    s = study(
        tasks=["zup"],
        seeds=[0, 1],
        styles=["own", "solved"],
        self_improvement={"solved": {**way, "method": "generated", "model": writer}},
    )
    (made,) = [job for job in s.jobs.values() if job.spec.get("kind") == "star"]
    (model,) = [s.jobs[ref] for ref in made.inputs["model"]]
    assert model.stage == "models" and model.spec["source"] == writer and made.spec["keep"] == 1
    assert made.spec["rationalise"] is False and made.spec["with_demonstration"] is False
    learned = [job for job in s.jobs.values() if job.stage == "train" and job.inputs["data"] == [made.id]]
    assert {job.spec["seed"] for job in learned} == {0, 1} and {job.spec["style"] for job in learned} == {"solved"}
    assert all(s.behind(job.id) == [job.id] for job in learned)
    unseen = {**way, "method": "generated", "model": {"hub": "lab/writer"}}
    with pytest.raises(UserError, match="self_improvement.solved.model.revision"):
        study(self_improvement={"solved": unseen})


def test_new_scale_touches_sweeps_and_selections_only(default):
    new = new_jobs(default, study(graft={"scales": [0.6, 0.7, 0.8, 1.0, 1.3]}))
    assert set(new) == {"evaluate", "select", "merge", "report"}


def test_points_keep_their_keys_when_a_scale_is_added(default):
    def points(s: Study) -> set[str]:
        return {p["key"] for j in s.jobs.values() if j.stage == "evaluate" for p in j.spec.get("points", [])}

    more = points(study(graft={"scales": [0.6, 0.7, 0.8, 1.0, 1.3]}))
    assert points(default) < more


def test_masks_per_tensor_are_further_points_and_move_no_other(default):
    def points(s: Study) -> dict[str, str]:
        return {p["key"]: p["name"] for j in s.jobs.values() if j.stage == "evaluate" for p in j.spec.get("points", [])}

    candidates = DEFAULT["graft"]["masks"]["candidates"]
    # what is the default may be said, and changes nothing
    said = study(graft={"masks": {"candidates": [{**c, "per": "model"} for c in candidates]}})
    assert set(said.jobs) == set(default.jobs)
    more = study(graft={"masks": {"candidates": [*candidates, {**candidates[0], "per": "tensor"}]}})
    assert set(new_jobs(default, more)) == {"evaluate", "select", "merge", "report"}
    added = points(more).items() - points(default).items()
    assert points(default).keys() < points(more).keys()
    assert added and all(".kfac-fisher-0.01-tensor" in name for _, name in added)


def test_moving_the_data_moves_no_key(default):
    assert set(study(data_root="/somewhere").jobs) == set(default.jobs)


def test_names_are_safe_file_names(default):
    for job in default.jobs.values():
        assert "/" not in job.name and ".." not in job.name and len(job.id) < 200


def test_plan_says_where_a_moved_model_lies(tmp_path):
    jobs = [Job("models", "m", {}, {}, "c", places={"path": place}) for place in ("/old", "/new")]
    assert jobs[0].key == jobs[1].key
    for job in jobs:
        assert read_job(write_plan({job.id: job}, tmp_path), job.id).places == job.places


def test_threads_of_a_job_are_those_of_its_spec(default):
    for job in default.jobs.values():
        ways = [job, *job.alternatives.values()]
        assert job.threads == max(way.spec.get("threads", 1) for way in ways)


def test_plan_file_gives_the_job_back(default, tmp_path):
    path = write_plan(default.jobs, tmp_path)
    for job in default.jobs.values():
        again = read_job(path, job.id)
        assert again == job and again.key == job.key


def test_key_ignores_readable_names_of_inputs():
    one = Job("train", "a", {"x": 1}, {"model": ["models/deployed-0123456789ab:p"]}, "c")
    two = Job("train", "a", {"x": 1}, {"model": ["models/renamed-0123456789ab:p"]}, "c")
    assert one.key == two.key
    assert one.key != Job("train", "a", {"x": 1}, {"model": ["models/deployed-0123456789ab:q"]}, "c").key


def test_small_stages_do_not_depend_on_big_rooms():
    def rooms(entry: str) -> set[str]:
        return {m.split(".")[1] for m in code.closure(code.ENTRIES[entry]) if m.count(".")}

    assert rooms("data") == {"tasks"}
    assert not any("science" in m or "tiny" in m for m in code.closure(code.ENTRIES["data"]))
    assert not any("self_distillation" in m for m in code.closure(code.ENTRIES["lineage"]))
    assert not any("supervised" in m or "self_dist" in m for m in code.closure(code.ENTRIES["train"]))
    assert rooms("select") <= {"evaluation"}
    assert rooms("report") <= {"analysis", "evaluation"}
    assert {m for m in code.closure(code.ENTRIES["report"]) if ".evaluation." in m} == {"grafting.evaluation.budget"}
    assert "analysis" not in rooms("evaluate") and "training" not in rooms("evaluate")
    assert not rooms("train") & {"evaluation", "merging", "analysis", "sensitivity"}


def test_planning_imports_neither_torch_nor_transformers():
    import subprocess
    import sys

    text = (
        "import sys; from grafting.plan.front import load_study; load_study(); "
        "print(sorted({'torch', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", text], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_keys_are_hashes_of_what_they_stand_for(default):
    """The plan puts canonical JSON together from pieces; here it is made in one."""
    for job in default.jobs.values():
        inputs = {role: [key_of(ref) for ref in refs] for role, refs in job.inputs.items()}
        identity = [job.stage, job.spec, inputs, job.code]
        if job.alternatives:
            identity.append({name: way.key for name, way in job.alternatives.items()})
        assert job.key == digest(identity)
        for way in (job, *job.alternatives.values()):
            settings = {n: v for n, v in way.spec.items() if n not in ("points", "keep", "candidates")}
            # a point of a frontier is the same one that a selection's test holds
            code = default._code("evaluate", *way.entry[1:]) if way.entry[0] == "frontier" else way.code
            for point in way.spec.get("points", []) if way.stage == "evaluate" else []:
                keys = {role: [key_of(ref) for ref in refs] for role, refs in way.inputs.items()}
                read, recipe = {role: keys[role] for role in ("model", "prior", "tasks")}, point["recipe"]
                if recipe is not None:
                    read["terms"] = [[keys["trained"][i], keys["donor"][i]] for i in recipe["terms"]]
                    if f"sensitivity_{recipe.get('mask', {}).get('estimator')}" in keys:
                        read["sensitivity"] = keys[f"sensitivity_{recipe['mask']['estimator']}"]
                    recipe = {name: value for name, value in recipe.items() if name != "terms"}
                assert point["key"] == digest(["point", recipe, settings, read, code])


def test_plan_file_holds_a_shared_candidate_once(default, tmp_path):
    ways = [way.id for job in default.jobs.values() for way in job.alternatives.values()]
    lines = write_plan(default.jobs, tmp_path).read_text().splitlines()[1:]
    names = [line.partition("\t")[0] for line in lines]
    assert len(names) == len(set(names))
    assert sum(name.startswith("way/") for name in names) == len(set(ways)) < len(ways)


def test_unknown_job_and_plan_file_are_errors(default, tmp_path):
    path = write_plan(default.jobs, tmp_path)
    with pytest.raises(UserError, match="no job train/absent"):
        read_job(path, "train/absent-000000000000")
    with pytest.raises(UserError, match="no such plan file"):
        read_job(tmp_path / "other.jsonl", "train/absent-000000000000")


# ---- aliases ---------------------------------------------------------------------------------------
def aliased(config, kind: str, new: str, old: str) -> Study:
    return Study(config, with_entry(Aliases(), Alias(kind, new, old, "only moved")))


def test_declared_code_leaves_every_key_where_it_is(default, monkeypatch):
    """After a refactor of the training loop, one entry per code digest brings all keys back."""
    loop = code.module_facts("grafting.training.loop")
    real = code.module_facts.__wrapped__
    changed = type(loop)(**{**loop.__dict__, "digest": "0" * 64})
    monkeypatch.setattr(code, "module_facts", lambda name: changed if name.endswith("training.loop") else real(name))
    code.own_digest.cache_clear()
    try:
        edited = Study(default.config)
        moved = set(edited.jobs) - set(default.jobs)
        assert {i.partition("/")[0] for i in moved} >= {"models", "train", "evaluate", "report"}
        pairs = {}
        for before, after in zip(default.jobs.values(), edited.jobs.values(), strict=True):
            if before.code != after.code:
                pairs[after.code] = before.code
        assert len(pairs) == 3  # lineage, and training with each of two objectives
        aliases = Aliases()
        for new, old in pairs.items():
            aliases = with_entry(aliases, Alias("code", new, old, "only moved"))
        again = Study(default.config, aliases)
        assert list(again.jobs) == list(default.jobs)
        job = next(job for job in again.jobs.values() if job.stage == "train")
        assert [alias["new"] for alias in job.aliases] == [new for new, old in pairs.items() if old == job.code]
    finally:
        code.own_digest.cache_clear()


def test_declared_key_of_a_job_leaves_the_keys_of_what_follows(default, tmp_path):
    changed = study(training={"clip_norm": 2.0}, learners={"opsd": None})
    before = study(learners={"opsd": None})
    name = "wug.own.sft.base.lr0.0003.s0.m0"
    (old,) = [j for j in before.jobs.values() if j.name == name]
    (new,) = [j for j in changed.jobs.values() if j.name == name]
    (sweep,) = [j for j in before.jobs.values() if j.name == "val.single.own.sft-base.lr0.0003.wug.s0.m0"]
    assert sweep.id not in changed.jobs
    after = aliased(changed.config, "keys", new.key, old.key)
    assert old.id in after.jobs and new.id not in after.jobs
    assert sweep.id in after.jobs
    job = after.jobs[old.id]
    assert job.own_key == new.key and job.aliases[0]["reason"] == "only moved"
    again = read_job(write_plan(after.jobs, tmp_path), old.id)
    assert again == job and again.key == old.key


def test_alias_file_survives_writing_with_its_comments(tmp_path):
    path = tmp_path / "aliases.yaml"
    path.write_text((PROJECT / "aliases.yaml").read_text())
    assert list(read_aliases(path)) == []
    header = path.read_text().split("code:")[0]
    first = with_entry(read_aliases(path), Alias("code", "000123456789", "00000000001e", "a: b # c"))
    second = with_entry(first, Alias("keys", "a" * 12, "b" * 12, "é"))
    write_aliases(path, second)
    assert path.read_text().startswith(header)
    assert read_aliases(path) == second
    assert list(read_aliases(tmp_path / "absent.yaml")) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("code:\n- {new: 'aaaaaaaaaaaa', old: 'bbbbbbbbbbbb'}", "code, entry 1: must have new, old and reason"),
        ("keys:\n- {new: 123456789012, old: 'bbbbbbbbbbbb', reason: r}", "keys, entry 1: new must be 12 hex digits in"),
        (
            "keys:\n- {new: 'aaaaaaaaaaaa', old: 'bbbbbbbbbbbb', reason: ''}",
            "keys, entry 1 .aaaaaaaaaaaa.: say in reason",
        ),
        ("names: []", "unknown key 'names'"),
        ("code: {a: b}", "must hold a list"),
        ("code: [", "not valid YAML"),
        (
            "code:\n- {new: 'aaaaaaaaaaaa', old: 'bbbbbbbbbbbb', reason: r}\n"
            "- {new: 'bbbbbbbbbbbb', old: 'aaaaaaaaaaaa', reason: r}",
            "code: the entries run in a circle: aaaaaaaaaaaa -> bbbbbbbbbbbb -> aaaaaaaaaaaa",
        ),
        ("code:\n- {new: 'aaaaaaaaaaaa', old: 'aaaaaaaaaaaa', reason: r}", "circle"),
        (
            "code:\n- {new: 'aaaaaaaaaaaa', old: 'bbbbbbbbbbbb', reason: r}\n"
            "- {new: 'aaaaaaaaaaaa', old: 'cccccccccccc', reason: r}",
            "aaaaaaaaaaaa stands there twice",
        ),
    ],
)
def test_unusable_alias_is_an_error_that_names_it(tmp_path, text, message):
    path = tmp_path / "aliases.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_aliases(path)


def test_alias_to_what_is_not_recorded_is_an_error(default, tmp_path):
    store, config = Store(tmp_path), default.config
    train = next(job for job in default.jobs.values() if job.stage == "train")
    evaluation = next(job for job in default.jobs.values() if job.name.startswith("val.single"))
    for kind, new in (("code", train.code), ("keys", train.key)):
        after = aliased(config, kind, new, "b" * 12)
        with pytest.raises(UserError, match=f"{kind}: {new} -> bbbbbbbbbbbb: there is no record of bbbbbbbbbbbb"):
            check_aliases(after.aliases, after.jobs.values(), store)
    write_json(store.code("b" * 12), {})
    after = aliased(config, "code", train.code, "b" * 12)
    check_aliases(after.aliases, after.jobs.values(), store)
    write_json(store.sentinel(f"evaluate/x-{'b' * 12}"), {"spec": {"points": []}})
    after = aliased(config, "keys", train.key, "b" * 12)
    with pytest.raises(UserError, match="is of another stage"):
        check_aliases(after.aliases, after.jobs.values(), store)
    after = aliased(config, "keys", evaluation.key, "b" * 12)
    with pytest.raises(UserError, match="lacks .* of the points"):
        check_aliases(after.aliases, after.jobs.values(), store)
    write_json(store.sentinel(f"train/x-{'b' * 12}"), {})
    after = aliased(config, "keys", train.key, "b" * 12)
    check_aliases(after.aliases, after.jobs.values(), store)
