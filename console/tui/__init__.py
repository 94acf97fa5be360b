"""The terminal screen: it shows a run and starts the actions of the operator."""
