"""`trace`: what each rank did when, as one file for Perfetto, and which rank kept the others waiting. No torch.

span_file.py      the spans of one rank, in a file that its process has mapped
chrome_trace.py   the files of all ranks joined into one, in the Trace Event Format
stragglers.py     which rank was slower than the others, and in which phase (pure)
worker/           in the processes of a run: what records the spans
"""
