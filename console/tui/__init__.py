"""The operator's screen: it shows what a run directory says and asks through `console.actions`."""
