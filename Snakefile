"""Front door: the configuration is checked, the study planned, the rules included, the targets named."""

import sys

from snakemake.utils import min_version

from grafting.config.load import read_yaml
from grafting.errors import UserError
from grafting.plan.front import load_study, set_environment

min_version("9.18")

try:
    # --configfile and --config are overlays on config.yaml, one upon another: `config` holds them merged key by key,
    # but a mapping that names a `kind` is replaced whole
    GIVEN = workflow.config_settings
    OVERLAYS = [*(read_yaml(path) for path in GIVEN.configfiles), dict(GIVEN.config)]
    # Snakemake itself says only later whether this is a dry run
    STUDY = load_study(*OVERLAYS, preview=not {"-n", "--dry-run", "--dryrun"}.isdisjoint(sys.argv))
except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
set_environment(STUDY)


include: "rules/common.smk"
include: "rules/data.smk"
include: "rules/models.smk"
include: "rules/rollout.smk"
include: "rules/train.smk"
include: "rules/sensitivity.smk"
include: "rules/merge.smk"
include: "rules/evaluate.smk"
include: "rules/report.smk"
include: "rules/version.smk"


localrules:
    all,
    checkpoints,
    evaluations,


rule all:
    default_target: True
    input:
        sentinel(STUDY.report),
    message:
        "The study is complete: see results/summary.md"


rule checkpoints:
    input:
        sentinels("models", "train", "merge"),
    message:
        "All checkpoints are made"


rule evaluations:
    input:
        sentinels("evaluate"),
    message:
        "All evaluations are done"
