"""Grafts and other merges, written out as model directories."""


rule merge:
    input:
        ancient(needed_by("merge")),
    output:
        "provenance/merge/{job}.json",
    log:
        "work/logs/merge/{job}.log",
    benchmark:
        "work/benchmarks/merge/{job}.tsv"
    group:
        bundle_of("merge")
    conda:
        "../envs/cpu.yaml"
    threads: threads_of("merge")
    resources:
        mem_mb=growing(2000),
        runtime=growing(60),
    params:
        plan=PLAN,
        module=module_of("merge"),
    message:
        "merge {wildcards.job}"
    shell:
        "python -m {params.module} --plan {params.plan:q} --job merge/{wildcards.job:q} --log {log:q}"
