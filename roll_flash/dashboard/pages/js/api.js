// Requests to the dashboard's server. An answer that is no success is an Error with the server's one line.

export async function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") query.append(name, each);
    }
  }
  let answer;
  try {
    answer = await fetch(`/api/${path}?${query}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the dashboard does not answer; has it ended? start it again with `roll-flash dash`");
  }
  const type = answer.headers.get("content-type") ?? "";
  const body = type.includes("json") ? await answer.json() : await answer.text();
  if (!answer.ok) throw new Error((body.error ?? body).trim());
  return body;
}
