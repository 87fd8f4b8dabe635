"""The real settings of the programs that are pointed at the gateway: emit, merge, read back.

Pure functions over text, except `files` and `connecting` (settings files) and `served` (asks the gateway for its
models). Knows nothing of the gateway's inside.
"""
