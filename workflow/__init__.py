"""What only the pipeline needs: the table of its steps, the rules in rules/, and what they ask of Snakemake."""
