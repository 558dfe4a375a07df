"""What a run shows and records. It decides nothing about training, and a step waits for none of it.

monitor.py                             collects what is logged, and exchanges it now and then
window.py, exchange.py                 weighted sums since the last exchange; the all-reduce that adds them up
display_choice.py, display.py, notebook_display.py   the progress display
trackers.py, services.py, media.py     where values are written; other makers' trackers; images and histograms
summary.py, settings_check.py          lines about the run; are all ranks' settings alike?

Closing never communicates, since other ranks may be gone.
"""
