"""Progress display, logging and trackers. Nothing here affects training, and no step waits for it.

monitor.py                             collects logged values, and exchanges them at intervals
window.py, exchange.py                 weighted sums since the last exchange; the all-reduce that adds them
display_choice.py, display.py, notebook_display.py   the progress display
trackers.py, services.py, media.py     writers of values; third-party trackers; images and histograms
summary.py, settings_check.py          lines about the run; the check that all ranks have the same settings

Closing never communicates, because other ranks may be gone.
"""
