"""The stratified decoder: everything that a technique may replace, and its leaves."""
