"""Learners: from a checkpoint and demonstrations to a checkpoint."""


rule train:
    input:
        ancient(needed_by("train")),
    output:
        "provenance/train/{job}.json",
    log:
        "work/logs/train/{job}.log",
    benchmark:
        "work/benchmarks/train/{job}.tsv"
    group:
        bundle_of("train")
    conda:
        "../envs/cpu.yaml"
    threads: threads_of("train")
    resources:
        mem_mb=growing(2000),
        runtime=growing(240),
    params:
        plan=PLAN,
    message:
        "train {wildcards.job}"
    shell:
        "python -m grafting.training --plan {params.plan:q} --job train/{wildcards.job:q} --log {log:q}"
