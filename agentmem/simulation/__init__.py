"""What tiers and policies would do with a trace of requests: hits, bytes moved, time saved, and the best possible.

Pure Python: knows no model, no store and no tensor.
"""
