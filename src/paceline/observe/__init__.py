"""Tools that observe a user's script: its calls, their source lines, and their tensors. Does not import torch.

The script need not use Paceline. An observer runs in the script's process, patches functions of torch when the script
imports torch (launcher/import_hook.py), and passes every argument and result through unchanged. It writes records, and
rules read the records afterwards. `paceline doctor` and `paceline verify` are built from these parts:

patching.py     One patcher. `Patches.around(owner, name, watch)` observes a function's calls with a generator: code
                before its `yield` runs before the call, code after it runs after the call. `before` and `after` are
                short forms, `replace` installs another function, `undo` restores all originals.
script_stack.py The script's line that makes the current call. `ScriptStack(roots)` distinguishes frames of the script,
                of libraries, of Paceline, and of the layers beneath (Python, torch). `caller()` returns the innermost
                line of the script. Use `anywhere` if the script is unknown.
event_log.py    `EventLog`: the events of one process. Its clock excludes the observer's time, errors of the observer
                become events, and `few` limits work that is too expensive for every step.
records.py      The file format of all logs: one JSON object per line. A reader may follow a file while it is written.
update_order.py The order of a rank's updates and of the collectives of all ranks, line by line.
digests.py      A tensor as numbers: `digest` (are the bits equal?), `row_digests`, `padded_rows`, `sample` (how large
                is the difference?), `projections` (one number per example).
sketches.py     A large tensor as 256 numbers. They preserve norms, sums and multiples of tensors.
trained_tensors.py
                The parameters, buffers and optimizer state of a script, with names that are the same in all runs.
write_tracer.py The script's lines that change its weights and gradients, and its calls of collectives, in order.
graph_lines.py  The script's lines that make the nodes of a loss's autograd graph.
source.py       The script's source as syntax trees: statements, functions, calls, assignments, by file and line.
slicing.py      Trace a line back to the line that uses a rank or a clock.
expressions.py  Trace an expression to its sources, through names, parameters and functions, for example to find out
                whether the number of processes is one of them.

A new observer, in four lines:

    log = EventLog(path, ScriptStack([script]))
    def watch(optimizer, *args, **options):
        yield
        log.record("stepped", lr=optimizer.param_groups[0]["lr"])
    log.patches.around(torch.optim.SGD, "step", watch)

source, slicing, expressions, records, script_stack and patching need no torch, so rules in the launcher can use them.
"""
