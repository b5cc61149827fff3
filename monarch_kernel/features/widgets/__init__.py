"""Widgets that ranks make are live: a slider of a rank moves in the page, and calls its observers on the rank.

Theory of operation
===================

A widget (ipywidgets, anywidget and what builds on them) is a pair of models, one in Python and one in the page, which exchange
messages over a comm. A rank has no connection to the page. `worker` therefore gives libraries comms whose messages go to the
controller (`CommSent`), and delivers messages of the page on the rank's main thread, between cells (`CommReceived`), as a
kernel does. The controller's part (`controller`) passes both on. The notebook opens a comm with the same id to the page
(`notebook.magics.rank_widgets`).

Each rank has its own models, so a cell on four ranks shows four sliders, each with the label of its rank.

Three things work differently on a rank:

- *Rate.* A loop that changes a widget 10,000 times a second would flood the page from each rank. Changes of a model that follow
  each other within `worker.EVERY_S` are merged into one message (`outbox`).
- *Output widgets.* A page captures the output of a request of the kernel; a rank has none. `captures` keeps what the code in
  ``with output:`` prints and displays, and sends it as the state of the widget. ``interact`` builds on this.
- *tqdm.notebook.* Its bars would be one widget per rank. `bars` makes them text, which the notebook merges into one bar.
"""
