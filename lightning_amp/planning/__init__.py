"""Plan which techniques to install: policies, plans, the memory model, the cost model, and reports."""
