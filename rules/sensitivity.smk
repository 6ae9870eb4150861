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
        mem_mb=lambda wildcards, attempt: 3000 * attempt,
        runtime=lambda wildcards, attempt: 120 * attempt,
    params:
        plan=PLAN,
        spec=spec_of("sensitivity"),
    message:
        "sensitivity {wildcards.job}"
    shell:
        "python -m grafting.sensitivity --plan {params.plan:q} --job sensitivity/{wildcards.job:q} --log {log:q}"
