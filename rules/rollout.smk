"""Rollouts of a checkpoint on a task's prompts, with and without the demonstration."""


rule rollout:
    input:
        ancient(needed_by("rollout")),
    output:
        "provenance/rollout/{job}.json",
    log:
        "work/logs/rollout/{job}.log",
    benchmark:
        "work/benchmarks/rollout/{job}.tsv"
    group:
        bundle_of("rollout")
    conda:
        "../envs/cpu.yaml"
    threads: threads_of("rollout")
    resources:
        mem_mb=growing(2000),
        runtime=growing(60),
    params:
        plan=PLAN,
    message:
        "rollout {wildcards.job}"
    shell:
        "python -m grafting.rollouts --plan {params.plan:q} --job rollout/{wildcards.job:q} --log {log:q}"
