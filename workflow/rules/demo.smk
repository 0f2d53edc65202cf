# The embedded site of the default run; a configuration with other URLs never needs it.


rule demo_site:
    output:
        urls=RUN / "site/urls.txt",
        site=RUN / "site/site.json",
    log:
        RUN / "logs/demo_site.log",
    resources:
        mem_mb=500,
        runtime=runtime("demo_site", 5),
    shell:
        "python -m workflow.demo.build --output {RUN:q}/site > {log:q} 2>&1"
