"""Runs lm-eval on a Hugging Face folder, without a network; for a Python that has lm-eval.

Usage: evaluate_folder.py FOLDER QUESTIONS: prints the accuracy on a file of lines {"question", "choices", "label"}.
"""

import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

if __name__ == "__main__":
    import lm_eval

    folder, questions = sys.argv[1:]
    task = {
        "task": "choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": questions}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": folder, "dtype": "float32"},
        tasks=[task],
        device="cpu",
        bootstrap_iters=0,
    )
    print(found["results"]["choices"]["acc,none"])
