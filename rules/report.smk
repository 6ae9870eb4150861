"""The report: tables, figure, verdict, exported to fixed places under results/."""


rule report:
    input:
        ancient(needed_by("report")),
    output:
        "results/report-{job}.json",
    log:
        "work/logs/report/{job}.log",
    benchmark:
        "work/benchmarks/report/{job}.tsv"
    group:
        bundle_of("report")
    conda:
        "../envs/cpu.yaml"
    resources:
        mem_mb=growing(2000),
        runtime=growing(30),
    params:
        plan=PLAN,
    message:
        "report {wildcards.job}"
    shell:
        "python -m grafting.analysis --plan {params.plan:q} --job report/{wildcards.job:q} --log {log:q}"
