"""The terminal screen: it shows a run, and starts actions through `console.actions`."""
