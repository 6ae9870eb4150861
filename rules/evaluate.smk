"""Evaluation of sweeps on validation data, selection, and the test of what was selected."""


rule evaluate:
    input:
        ancient(needed_by("evaluate")),
    output:
        "provenance/evaluate/{job}.json",
    log:
        "work/logs/evaluate/{job}.log",
    benchmark:
        "work/benchmarks/evaluate/{job}.tsv"
    group:
        bundle_of("evaluate")
    conda:
        "../envs/cpu.yaml"
    threads: threads_of("evaluate")
    resources:
        mem_mb=growing(2000),
        runtime=growing(120),
    params:
        plan=PLAN,
        module=module_of("evaluate"),
    message:
        "evaluate {wildcards.job}"
    shell:
        "python -m {params.module} --plan {params.plan:q} --job evaluate/{wildcards.job:q} --log {log:q}"


rule select:
    input:
        ancient(needed_by("select")),
    output:
        "provenance/select/{job}.json",
    log:
        "work/logs/select/{job}.log",
    benchmark:
        "work/benchmarks/select/{job}.tsv"
    group:
        bundle_of("select")
    conda:
        "../envs/cpu.yaml"
    threads: threads_of("select")
    resources:
        mem_mb=growing(500),
        runtime=growing(10),
    params:
        plan=PLAN,
    message:
        "select {wildcards.job}"
    shell:
        "python -m grafting.evaluation.select --plan {params.plan:q} --job select/{wildcards.job:q} --log {log:q}"
