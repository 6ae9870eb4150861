"""Fisher information of the deployed model on retention data."""


rule sensitivity:
    input:
        ancient(needed_by("sensitivity")),
    output:
        "provenance/sensitivity/{job}.json",
    log:
        "work/logs/sensitivity/{job}.log",
    benchmark:
        "work/benchmarks/sensitivity/{job}.tsv"
    group:
        bundle_of("sensitivity")
    conda:
        "../envs/cpu.yaml"
    threads: threads_of("sensitivity")
    resources:
        mem_mb=growing(3000),
        runtime=growing(120),
    params:
        plan=PLAN,
    message:
        "sensitivity {wildcards.job}"
    shell:
        "python -m grafting.sensitivity --plan {params.plan:q} --job sensitivity/{wildcards.job:q} --log {log:q}"
