"""What a sequence of tasks leaves: the matrix a[i][j] (accuracy on task j after stage i) and figures from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grafting.analysis.collect import Selected, Study

Matrix = dict[int, dict[str, float]]
PRIOR = "prior"
NAMES = ("average", "forgetting", "backward transfer", "forward transfer")


def sequence_matrix(study: Study, selected: Selected, seeds: Sequence[int] | None = None) -> Matrix:
    """stage -> {task or "prior": accuracy}, mean over the seeds at hand (of `seeds`, if given)."""
    matrix: Matrix = {}
    for stage in sorted({p.labels["stage"] or 0 for p in selected.points}):
        points = [
            p for p in selected.points
            if (p.labels["stage"] or 0) == stage and (seeds is None or p.labels["seed"] in seeds)
        ]  # fmt: skip
        row = {
            task: [a for p in points if (a := p.accuracy("new", [task])) is not None] for task in study.spec["tasks"]
        }
        row[PRIOR] = [a for p in points if (a := p.accuracy("prior")) is not None]
        matrix[stage] = {name: mean(values) for name, values in row.items() if values}
    return matrix


def before(study: Study, model_seed: object) -> dict[str, float]:
    """The deployed model's test accuracy per task, and prior; tasks it was not evaluated on are left out."""
    found = {}
    for task in study.spec["tasks"]:
        point = study.deployed("test", model_seed, task)
        if point is not None:
            found[task] = point.accuracy("new", [task])
            found.setdefault(PRIOR, point.accuracy("prior"))
    return {name: value for name, value in found.items() if value is not None}


def sequence_figures(study: Study, selected: Selected, matrix: Matrix) -> dict[str, float]:
    """Average accuracy, forgetting, backward and forward transfer; each only where the matrix is complete.

    With T stages, task i learned at stage i, a[-1] the deployed model: average = mean_j a[T-1][j];
    forgetting = mean_{j<T-1} max_i a[i][j] - a[T-1][j]; backward = mean_{j<T-1} a[T-1][j] - a[j][j];
    forward = mean_{j>0} a[j-1][j] - a[-1][j] (Lopez-Paz and Ranzato 2017; Chaudhry et al. 2018).
    """
    tasks = study.spec["tasks"]
    last = len(tasks) - 1
    if any(matrix.get(i, {}).get(task) is None for i in range(len(tasks)) for task in tasks):
        return {}
    figures = {"average": mean([matrix[last][task] for task in tasks])}
    if last > 0:
        earlier = tasks[:last]
        figures["forgetting"] = mean([max(matrix[i][t] for i in range(last)) - matrix[last][t] for t in earlier])
        figures["backward transfer"] = mean([matrix[last][t] - matrix[j][t] for j, t in enumerate(earlier)])
        start = before(study, selected.labels["model_seed"])
        if all(t in start for t in tasks[1:]):
            figures["forward transfer"] = mean([matrix[j][t] - start[t] for j, t in enumerate(tasks[1:])])
    return figures


def normalised(tasks: Sequence[str], matrices: Mapping[str, Matrix], start: Mapping[str, float]) -> dict[str, Matrix]:
    """Family -> stage -> task -> (a[i][j] - a[-1][j]) / (best_j - a[-1][j]), best_j the highest accuracy on task j
    that any family reaches after any stage: 0 = the deployed model, 1 = the best seen.

    Our reading of the normalised curve of SDFT (arXiv 2601.19897). Tasks nobody improves, or that the deployed
    model was not evaluated on, are left out.
    """
    result: dict[str, Matrix] = {family: {} for family in matrices}
    for task in tasks:
        seen = [row[task] for matrix in matrices.values() for row in matrix.values() if task in row]
        if task not in start or not seen or max(seen) <= start[task]:
            continue
        span = max(seen) - start[task]
        for family, matrix in matrices.items():
            for stage, row in matrix.items():
                if task in row:
                    result[family].setdefault(stage, {})[task] = (row[task] - start[task]) / span
    return result


def normalised_curve(tasks: Sequence[str], matrix: Matrix) -> list[float]:
    """Per stage, the mean of the normalised accuracies over the tasks learned so far."""
    return [
        mean(own)
        for stage, row in sorted(matrix.items())
        if (own := [row[task] for task in tasks[: stage + 1] if task in row])
    ]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)
