"""Data flow one way, and so do imports."""

from grafting.plan import code

ROOMS = [
    "config", "plan", "tasks", "models", "rollouts", "training", "sensitivity", "merging", "evaluation", "analysis",
]  # fmt: skip
#: Open to every room: the exception for users, the door to the Hub, and what runs and records jobs.
OPEN = {"errors", "hub", "provenance"}
#: Light registries of names, which config and plan read without the rooms behind them.
REGISTRIES = {"grafting.tasks", "grafting.tasks.stage", "grafting.tasks.sources", "grafting.tasks.registry",
              "grafting.tasks.scorers", "grafting.tasks.judge", "grafting.tasks.harness_suites", "grafting.training",
              "grafting.training.objectives", "grafting.tasks.tiny_language"}  # fmt: skip


def test_a_room_imports_only_from_rooms_to_its_left():
    wrong = []
    for path in sorted(code.PACKAGE.rglob("*.py")):
        parts = path.relative_to(code.PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        room = parts[1] if len(parts) > 2 else None
        if room not in ROOMS:
            continue
        for imported in code.imports(module):
            other = imported.split(".")[1] if "." in imported else room
            if other in OPEN or (room in ("config", "plan") and imported in REGISTRIES):
                continue
            if ROOMS.index(other) > ROOMS.index(room):
                wrong.append(f"{module} imports {imported}")
    assert wrong == []


def test_files_stay_short():
    long = {p.name: n for p in code.PACKAGE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 450}
    assert long == {}
