// Requests to the server, with an API key where it wants one; the key stays in this tab.

export const byId = (id) => document.getElementById(id);

let asking = null;

function askForKey() {
  if (asking) return asking;
  const dialog = byId("key-dialog");
  asking = new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      sessionStorage.setItem("cardan-key", byId("key").value.trim());
      asking = null;
      resolve();
    }, { once: true });
  });
  dialog.showModal();
  return asking;
}

export async function ask(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem("cardan-key");
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { ...options, headers });
    if (answer.status !== 401) return answer;
    await askForKey();
  }
}
