// A word of code in a text stays on one line, as in blocks of code: browsers would break it after a hyphen or a slash.
for (const code of document.querySelectorAll(".md-content :not(pre) > code")) {
  if (!code.children.length) code.innerHTML = code.innerHTML.replace(/\S+/g, "<span>$&</span>");
}
