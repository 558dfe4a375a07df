"""`trace`: a timeline of all ranks in one file for Perfetto, and a report of slow ranks. Only worker/ imports torch.

span_file.py      the spans of one rank, in a memory-mapped file
chrome_trace.py   joins the files of all ranks into one, in the Trace Event Format
stragglers.py     finds ranks that are slower than the others, and the phase in which they are slower (pure)
worker/           records the spans, in the processes of a run
"""
