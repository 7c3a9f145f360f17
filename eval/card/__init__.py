"""Everything that only a GPU can tell, in stages that end within minutes and can be resumed.

`stages` says what is measured, by what the other folders of `eval` measure; `journal`, `worker` and `supervisor` keep
results, run pieces of a stage in a process of their own, and end that process in time.
"""
