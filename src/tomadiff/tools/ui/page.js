// Gradio's before/after slider answers to a mouse only: give its handle a place in the tab order and arrow keys.
() => {
  const STEP = 0.05;

  function say(handle, share) {
    const percent = Math.round(100 * share);
    handle.setAttribute("aria-valuenow", percent);
    handle.setAttribute("aria-valuetext", `${percent}% dense, the rest merged`);
  }

  function place(handle) {
    const frame = handle.parentElement.getBoundingClientRect();
    const box = handle.getBoundingClientRect();
    return { frame, middle: box.left + box.width / 2, height: box.top + box.height / 2 };
  }

  function drag(handle, share) {
    const { frame, middle, height } = place(handle);
    const to = frame.left + share * frame.width;
    const mouse = (type, target, x) =>
      target.dispatchEvent(
        new MouseEvent(type, { bubbles: true, cancelable: true, view: window, clientX: x, clientY: height })
      );
    mouse("mousedown", handle, middle);
    mouse("mousemove", window, to);
    mouse("mouseup", window, to);
    say(handle, share);
  }

  function press(event) {
    const handle = event.currentTarget;
    const { frame, middle } = place(handle);
    const share = (middle - frame.left) / frame.width;
    const wanted = {
      ArrowLeft: share - STEP, ArrowDown: share - STEP, ArrowRight: share + STEP, ArrowUp: share + STEP,
      Home: 0, End: 1,
    }[event.key];
    if (wanted === undefined) return;
    event.preventDefault();
    drag(handle, Math.min(1, Math.max(0, wanted)));
  }

  function equip() {
    for (const handle of document.querySelectorAll("#before-after .outer:not([tabindex])")) {
      const role = { role: "slider", tabindex: 0, "aria-label": "Dense or merged", "aria-valuemin": 0, "aria-valuemax": 100 };
      for (const [name, value] of Object.entries(role)) handle.setAttribute(name, value);
      say(handle, 0.5);
      handle.addEventListener("keydown", press);
    }
  }

  new MutationObserver(equip).observe(document.body, { childList: true, subtree: true });
  equip();
}
