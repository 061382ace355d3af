"""Recorded and synthesised workloads: the Parquet schema, who owns which token, importers, synthesis and statistics.

Doors: `schema.read_trace` and `schema.write_trace`, `content.PageKeys` and `content.TokenSource`,
`importers.import_trace`, `synth.synthesise`, `statistics.trace_info`. Nothing here knows about engines or replays.
"""
