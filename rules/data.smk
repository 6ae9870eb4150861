"""Tasks and suites: examples, splits, demonstrations."""


rule data:
    input:
        ancient(needed_by("data")),
    output:
        "provenance/data/{job}.json",
    log:
        "work/logs/data/{job}.log",
    benchmark:
        "work/benchmarks/data/{job}.tsv"
    group:
        bundle_of("data")
    conda:
        "../envs/cpu.yaml"
    threads: threads_of("data")
    resources:
        mem_mb=growing(1000),
        runtime=growing(30),
    params:
        plan=PLAN,
    message:
        "data {wildcards.job}"
    shell:
        "python -m grafting.tasks --plan {params.plan:q} --job data/{wildcards.job:q} --log {log:q}"
