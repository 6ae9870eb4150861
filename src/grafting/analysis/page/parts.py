"""Style and script of the page: part of the code, so that a change of them makes the report anew."""

CSS = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1a1c20;--soft:#5b616b;--line:#d9dce1;--tint:#f4f5f7;--link:#0057a8;
--good:#00684a;--bad:#a8380b;--even:#5b616b;--mark:#fff3c4}
@media (prefers-color-scheme:dark){:root{--paper:#15171a;--ink:#e8e9eb;--soft:#a3a9b3;--line:#363a41;--tint:#1f2226;
--link:#7cb7ff;--good:#4fd0a3;--bad:#ff9a6b;--even:#a3a9b3;--mark:#4a3f12}}
*{box-sizing:border-box}
html{scroll-padding-top:3.2rem}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif}
main,header.top{max-width:76rem;margin:0 auto;padding:0 1.2rem}
h1{font-size:1.7rem;line-height:1.2;margin:1.4rem 0 .4rem}
h2{font-size:1.3rem;margin:2.6rem 0 .6rem;padding-top:.5rem;border-top:1px solid var(--line)}
h3{font-size:1.05rem;margin:1.6rem 0 .4rem}
p,ul{max-width:46rem}
a{color:var(--link)}
a:focus-visible,button:focus-visible,input:focus-visible,summary:focus-visible,[tabindex]:focus-visible{
outline:3px solid var(--link);outline-offset:2px}
nav{position:sticky;top:0;z-index:5;background:var(--paper);border-bottom:1px solid var(--line)}
nav ul{display:flex;gap:1rem;list-style:none;max-width:76rem;margin:0 auto;padding:.6rem 1.2rem;overflow-x:auto;
white-space:nowrap;font-size:.9rem}
.skip{position:absolute;left:-100vw}
.skip:focus{left:1rem;top:1rem;background:var(--paper);padding:.4rem;z-index:9}
.verdict{font-weight:650}
.supported{color:var(--good)}.refuted{color:var(--bad)}.inconclusive,.missing{color:var(--even)}
.lead{font-size:1.05rem}
.soft,figcaption,.note{color:var(--soft);font-size:.9rem}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:6px;margin:.5rem 0 1rem;max-height:36rem;
overflow-y:auto}
table{border-collapse:collapse;width:100%;font-size:.86rem;font-variant-numeric:tabular-nums}
th,td{padding:.34rem .6rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
td.n,th.n{text-align:right;white-space:nowrap}
td.wide{min-width:16rem}
thead th{position:sticky;top:0;background:var(--tint);white-space:nowrap;z-index:1}
tbody tr:last-child td{border-bottom:0}
th button{font:inherit;font-weight:600;color:inherit;background:none;border:0;padding:0;cursor:pointer;
text-align:inherit}
th button::after{content:" \\2195";color:var(--soft);font-weight:400}
th[aria-sort=ascending] button::after{content:" \\2191";color:var(--link)}
th[aria-sort=descending] button::after{content:" \\2193";color:var(--link)}
.filter{display:flex;gap:.6rem;align-items:center;flex-wrap:wrap;font-size:.9rem}
.filter input{font:inherit;padding:.3rem .5rem;border:1px solid var(--soft);border-radius:4px;background:var(--paper);
color:var(--ink);min-width:0;width:16rem;max-width:100%}
tr.strong td:first-child,td.strong{font-weight:650}
figure{margin:1rem 0 1.8rem}
figure img{display:block;max-width:100%;height:auto;background:#fff;border:1px solid var(--line);border-radius:6px;
padding:.4rem}
@media (prefers-color-scheme:dark){figure img{filter:brightness(.88)}}
section{content-visibility:auto;contain-intrinsic-size:auto 60rem}
details{border:1px solid var(--line);border-radius:6px;margin:.35rem 0;padding:.3rem .7rem}
details>summary{cursor:pointer;overflow-wrap:anywhere}
details:target{background:var(--mark)}
pre{overflow-x:auto;background:var(--tint);padding:.6rem;border-radius:6px;font-size:.8rem;max-width:100%}
code{font-size:.88em;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem .8rem;font-size:.86rem}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
footer{max-width:76rem;margin:3rem auto 2rem;padding:1rem 1.2rem;border-top:1px solid var(--line);color:var(--soft);
font-size:.85rem}
@media (max-width:40rem){body{font-size:15px}h1{font-size:1.4rem}main,header.top{padding:0 .8rem}
.figure-scroll{overflow-x:auto}.figure-scroll img{min-width:36rem}dl{grid-template-columns:1fr}dt{margin-top:.3rem}}
@media print{section{content-visibility:visible}nav,.filter{display:none}.scroll{max-height:none;overflow:visible}}
"""

SCRIPT = """
'use strict';
(function(){
function value(row,i){var c=row.cells[i],v=c.getAttribute('data-v');
 if(v!==null){return v===''?null:Number(v);}return c.textContent.trim().toLowerCase();}
function compare(a,b){if(a===null||b===null){return a===b?0:a===null?1:-1;}
 if(typeof a==='number'&&typeof b==='number'){return a-b;}return String(a)<String(b)?-1:String(a)>String(b)?1:0;}
document.querySelectorAll('table.live').forEach(function(table){
 var heads=table.tHead.rows[0].cells,body=table.tBodies[0];
 Array.prototype.forEach.call(heads,function(head,i){
  var button=document.createElement('button');button.type='button';button.textContent=head.textContent;
  head.textContent='';head.appendChild(button);
  button.addEventListener('click',function(){
   var down=head.getAttribute('aria-sort')==='ascending',sign=down?-1:1;
   Array.prototype.forEach.call(heads,function(h){h.removeAttribute('aria-sort');});
   head.setAttribute('aria-sort',down?'descending':'ascending');
   var rows=Array.prototype.map.call(body.rows,function(r,at){return [value(r,i),at,r];});
   rows.sort(function(a,b){if(a[0]===null||b[0]===null){return compare(a[0],b[0])||a[1]-b[1];}
    return sign*compare(a[0],b[0])||a[1]-b[1];});
   rows.forEach(function(r){body.appendChild(r[2]);});});});
 var box=document.querySelector('input[data-table="'+table.id+'"]');
 if(!box){return;}
 var said=document.getElementById(table.id+'-said');
 function filter(){var words=box.value.toLowerCase().split(/\\s+/).filter(Boolean),shown=0;
  Array.prototype.forEach.call(body.rows,function(r){
   var text=r.textContent.toLowerCase(),fits=words.every(function(w){return text.indexOf(w)>=0;});
   r.hidden=!fits;shown+=fits;});
  said.textContent=shown+' of '+body.rows.length+' rows';}
 box.addEventListener('input',filter);if(box.value){filter();}});
var pictures=document.querySelectorAll('img[data-src]');
function draw(img){if(img.dataset.src){img.src=img.dataset.src;delete img.dataset.src;}}
var near=new IntersectionObserver(function(seen){seen.forEach(function(e){
 if(e.isIntersecting){draw(e.target);near.unobserve(e.target);}});},{rootMargin:'800px'});
pictures.forEach(function(img){near.observe(img);});
window.addEventListener('beforeprint',function(){pictures.forEach(draw);});
function open(){var id=decodeURIComponent(location.hash.slice(1)),at=id&&document.getElementById(id);
 if(!at){return;}for(var p=at;p;p=p.parentElement){if(p.tagName==='DETAILS'){p.open=true;}}
 at.scrollIntoView();var s=at.querySelector('summary');if(s){s.focus({preventScroll:true});}}
window.addEventListener('hashchange',open);open();
})();
"""
