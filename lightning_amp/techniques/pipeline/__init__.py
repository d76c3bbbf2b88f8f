"""Run the blocks of a module as stages of a pipeline: prediction, schedules, stages, training steps."""
