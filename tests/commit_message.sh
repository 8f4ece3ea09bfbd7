#!/usr/bin/env bash
# The commit-msg hook that launch/setup.sh installs: refuses a message without the form of CONTRIBUTING.md, "Commits".
# usage: tests/commit_message.sh FILE
set -euo pipefail

# What git itself would leave out: the diff below the scissors of `commit --verbose`, and comments.
message=$(sed -e '/^# -* >8 -*$/,$d' -e '/^#/d' "$1")
message=$(sed '/[^[:space:]]/,$!d' <<<"$message") # without the empty lines at its beginning
subject=$(head -n 1 <<<"$message")
[[ $subject == fixup!* || $subject == squash!* || $subject == amend!* ]] && exit 0 # they end in another commit
rest=$(tail -n +2 <<<"$message")
# Trailers name people and tickets; they do not say why.
body=$(grep -vE '^[[:space:]]*$|^(Signed-off-by|Co-authored-by|Reviewed-by|Change-Id): ' <<<"$rest" || true)

refuse() {
  echo "error: $1; the message is kept in $2" >&2
  exit 1
}
[[ -n $subject ]] || refuse "the commit message is empty; write a subject and a body" "$1"
((${#subject} <= 72)) || refuse "the subject has ${#subject} characters and at most 72 are allowed; shorten it" "$1"
[[ -z $rest || -z $(head -n 1 <<<"$rest") ]] || refuse "the second line belongs to no paragraph; leave it empty" "$1"
[[ -n $body ]] || refuse "the message has no body; say why the change is needed and how it was proved" "$1"
