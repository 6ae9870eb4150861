"""The lineage: pretraining checkpoints, base and deployed model; made here, or fetched."""


rule models:
    input:
        ancient(needed_by("models")),
    output:
        "provenance/models/{job}.json",
    log:
        "work/logs/models/{job}.log",
    benchmark:
        "work/benchmarks/models/{job}.tsv"
    group:
        bundle_of("models")
    conda:
        "../envs/cpu.yaml"
    threads: threads_of("models")
    resources:
        mem_mb=growing(2000),
        runtime=growing(480),
    params:
        plan=PLAN,
        module=("grafting.training.lineage" if STUDY.config.lineage.kind == "scratch" else "grafting.models"),
    message:
        "models {wildcards.job}"
    shell:
        "python -m {params.module} --plan {params.plan:q} --job models/{wildcards.job:q} --log {log:q}"
