"""What people and programs read: JSON documents, terminal tables, a Markdown report, progress lines.

estimates  samples → one number a session → a mean with a 95 % interval
views      runs → the JSON document of each level (workload_view: level 3; documents: what all share)
grids      documents → rows of text, once for every medium        verdicts   decisions → rows of text
tables     grids → a terminal        markdown   grids → report.md        plain   one line a finished trial
text       numbers with units, names without control characters

It measures nothing and decides nothing. Names come from suites, plug-ins and traces: they are hostile input, and every
medium escapes them in its own way. rich is imported where a terminal is written to.
"""
