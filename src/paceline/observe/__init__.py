"""The kit for observing a user's script: what it does, in which line, and with which tensors. No torch at its import.

The script may know nothing of Paceline. An observer runs in the script's own process, patches functions of torch when
the script imports it (launcher/import_hook.py), and passes every argument and result on unchanged. It writes records;
rules read them afterwards. `paceline doctor` and `paceline verify` are built of these parts:

patching.py     One patcher. `Patches.around(owner, name, watch)` watches the calls of a function by a generator: code
                before its `yield` runs before the call, code after it runs after the call. `before` and `after` are
                the short forms, `replace` puts in another function, `undo` puts all back.
script_stack.py Where the current call is made. `ScriptStack(roots)` tells the script's frames from those of libraries,
                of Paceline, and of what lies beneath (Python, torch). `caller()` is the innermost line of the script.
                `anywhere` is for where it is not known which script runs.
event_log.py    `EventLog`: the events of one process. It has the clock, without the observer's own time; it keeps the
                observer's errors as events; and `few` bounds what costs too much to be done at every step.
records.py      The file format of all logs: a JSON object a line. A reader may follow a file that is still written.
digests.py      A tensor as numbers: `digest` (the same bits?), `row_digests`, `padded_rows`, `sample` (how far
                apart?), `projections` (a number for each example).
sketches.py     A large tensor as 256 numbers, of which norms, sums and multiples can still be read.
source.py       The script's text as syntax trees: statements, functions, calls, assignments, by file and line.
slicing.py      From a line that acts back to the line where a rank or a clock comes in.
expressions.py  What an expression is made of, through names, parameters and functions; is the number of processes
                among it?

A new observer, in four lines:

    log = EventLog(path, ScriptStack([script]))
    def watch(optimizer, *args, **options):
        yield
        log.record("stepped", lr=optimizer.param_groups[0]["lr"])
    log.patches.around(torch.optim.SGD, "step", watch)

source, slicing, expressions, records, script_stack and patching need no torch: rules on the host use them.
"""
