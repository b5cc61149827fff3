"""Watch of live loops: says below the cell, and in the view, what goes wrong in a training loop without an error.

Theory of operation
===================

Each rule is a pure part. It sees numbers that a loop has anyway, so that a step costs next to nothing:

- *Values* (`values`). A rank looks at the values of ``live.log`` when it reports them, a few times a second: at the first value
  that is not finite, and at a loss far above the last ones.
- *Loader* (`loader`). A rank sums the time in which the thread of the loop waits for a batch of a DataLoader.
- *Stragglers* (`stragglers`). Ranks that train together take equally long for a step, because they wait for the slowest one in
  collectives. So the notebook compares when the ranks have started the last collectives, as far as they report that; and it
  asks them how many collectives they have started, and counts how often one is behind.

Reports bring the first two to the controller (`features.live.loops`). The notebook tells each of them once, with its usual
causes and what to do (`texts`, `notebook.cells.loop_watch`).
"""
